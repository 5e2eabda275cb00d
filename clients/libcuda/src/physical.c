// SPDX-License-Identifier: MIT
#include "physical.h"

#include "failover/mirror.h"
#include "failover/unmapping.h"
#include "proxy.h"
#include "turn.h"
#include "vault.h"
#include "window.h"

#define FENCE_MS 1000

/*
 * What the program has freed is free when the daemon has let go of it too, and the copy of the driver that was
 * left: before memory is said to be out, that is waited for, a quarter of a second at most, or a whole one.
 */
static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, CUdevice device)
{
	CUmemAllocationProp property = mpsd_window_property(device);
	CUresult result = real_cuMemCreate(handle, size, &property, 0);

	if (result == CUDA_ERROR_OUT_OF_MEMORY && mpsd_vault_settle())
		result = real_cuMemCreate(handle, size, &property, 0);
	if (result == CUDA_ERROR_OUT_OF_MEMORY && mpsd_unmapping_await(FENCE_MS))
		result = real_cuMemCreate(handle, size, &property, 0);
	/* A driver may have it for memory that is not exported alone. */
	if (result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY && property.allocFlags.gpuDirectRDMACapable) {
		property.allocFlags.gpuDirectRDMACapable = 0;
		result = real_cuMemCreate(handle, size, &property, 0);
	}
	return result;
}

CUresult mpsd_physical_access(struct arena_range range, uint32_t devices, CUmemAccess_flags flags)
{
	CUmemAccessDesc access[MPSD_DEVICES];
	size_t count = 0;

	for (int i = 0; i < MPSD_DEVICES; i++)
		if (devices >> i & 1)
			access[count++] = (CUmemAccessDesc){
				.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = i }, .flags = flags };
	return real_cuMemSetAccess(range.base, range.size, access, count);
}

CUresult mpsd_physical_place(struct arena_range range, uint32_t devices, CUmemGenericAllocationHandle handle)
{
	CUresult result = real_cuMemMap(range.base, range.size, 0, handle, 0);

	if (result != CUDA_SUCCESS)
		return result;
	result = mpsd_physical_access(range, devices, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
	if (result != CUDA_SUCCESS)
		real_cuMemUnmap(range.base, range.size);
	return result;
}

CUresult mpsd_physical_map(struct arena_range range, CUdevice device, uint32_t peers)
{
	CUmemGenericAllocationHandle handle;
	CUresult result;

	if (!range.size)
		return CUDA_SUCCESS;
	result = create(&handle, range.size, device);
	if (result != CUDA_SUCCESS)
		return result;
	result = mpsd_physical_place(range, 1u << device | peers, handle);
	if (result == CUDA_SUCCESS)
		mpsd_mirror_born(range, device, handle);
	if (result != CUDA_SUCCESS || !mpsd_vault_put(range.base, range.size, device, handle))
		real_cuMemRelease(handle);
	return result;
}

void mpsd_physical_unmap(struct arena_range range)
{
	bool turn = mpsd_turn_take();

	mpsd_mirror_gone(range);
	real_cuMemUnmap(range.base, range.size);
	mpsd_turn_give(turn);
}
