// SPDX-License-Identifier: MIT
/*
 * No driver has these: the first two stand for UVM_FREE and UVM_CREATE_EXTERNAL_RANGE on the process's descriptor of
 * /dev/nvidia-uvm, which the stand-in has none of. The first one waits for the resource manager when nothing leads
 * there any more; the second one says whether that is so. The last one stands for what frees a copy's device.
 */
#include <sys/mman.h>

#include "standin.h"

#define ROOM_BYTES ((size_t)64 << 20)

API CUresult standinCutRange(CUdeviceptr base, size_t size);
API CUresult standinExternalRange(CUdeviceptr base, size_t size);

API CUresult standinCutRange(CUdeviceptr base, size_t size)
{
	bool is_room = size >= ROOM_BYTES;
	struct range *range;

	if (gate_wants(GATE_NO_CUT))
		return CUDA_ERROR_INVALID_VALUE;
	gate_keep(GATE_UNMAP);
	if (is_room)
		gate_keep(GATE_ROOM);
	if (is_room && gate_wants(GATE_NO_ROOM_CUT))
		return CUDA_ERROR_INVALID_VALUE;
	lock_memory();
	range = range_from(base, RANGE_MAPPED);
	if (!range || range->size != size || range->is_cut)
		return leave_memory(CUDA_ERROR_INVALID_VALUE);
	mmap(gpu_pointer(base), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
	range->readable = range->writable = false;
	range->is_cut = true;
	leave_memory(CUDA_SUCCESS);
	gate_keep(GATE_MANAGER);
	return CUDA_SUCCESS;
}

API CUresult standinExternalRange(CUdeviceptr base, size_t size)
{
	struct range *range;
	bool is;

	pthread_mutex_lock(&gpu_lock);
	range = range_from(base, RANGE_MAPPED);
	is = range ? range->is_cut && range->size == size : is_range_free(base, size, RANGE_MAPPED);
	return leave(is ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

API CUresult standinGiveBack(void);

/* What the contexts of this copy have on the GPU: whoever still wants something of one is told that it is lost. */
API CUresult standinGiveBack(void)
{
	pthread_mutex_lock(&gpu_lock);
	for (int i = 0; i < MOST_DEVICES; i++)
		if (primary_of(i)->retained)
			kill_context(primary_of(i), CUDA_ERROR_LAUNCH_FAILED);
	pthread_mutex_unlock(&gpu_lock);
	note("gave back");
	return CUDA_SUCCESS;
}
