// SPDX-License-Identifier: MIT
/*
 * What the program makes by cuMemCreate() is made exportable, and a descriptor of it kept: so another copy of the driver
 * can have it too.
 *
 * Memory of the host's is made anew by the next copy as long as the program has not mapped it: it has no content. NCCL makes
 * such memory only to see whether it could.
 *
 * Not followed: the host's once it is mapped, what cannot be exported as a descriptor, and what is imported or exported by
 * the program.
 */
#include "failover/blocks.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "failover/descriptors.h"
#include "failover/kept.h"
#include "failover/line.h"
#include "failover/unmapping.h"
#include "failover/vmm.h"
#include "turn.h"

#define FENCE_MS 1000
#define FIRST_NAME ((CUmemGenericAllocationHandle)0x6d707364 << 32)	/* no handle of a driver's was seen there */

const char mpsd_vmm_outside[] = "memory of the host or outside a window that the program maps";

static struct mpsd_block *blocks[MPSD_VMM_BUCKETS];

/* Also one that is mapped alone, and has no name any more. */
static struct mpsd_block *find_any(CUmemGenericAllocationHandle name)
{
	struct mpsd_block *block = blocks[mpsd_vmm_bucket(name)];

	while (block && block->name != name)
		block = block->next;
	return block;
}

struct mpsd_block *mpsd_block_find(CUmemGenericAllocationHandle name)
{
	struct mpsd_block *block = find_any(name);

	return block && block->names ? block : NULL;
}

void mpsd_block_drop_if_unused(struct mpsd_block *block)
{
	struct mpsd_block **link = &blocks[mpsd_vmm_bucket(block->name)];

	if (block->names || block->mappings)
		return;
	while (*link != block)
		link = &(*link)->next;
	*link = block->next;
	if (block->fd >= 0)
		close(block->fd);
	free(block);
}

static bool is_carried(const CUmemAllocationProp *prop)
{
	return prop->type == CU_MEM_ALLOCATION_TYPE_PINNED && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
}

static bool is_of_host(const CUmemAllocationProp *prop)
{
	return prop->location.type == CU_MEM_LOCATION_TYPE_HOST || prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA ||
	       prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
		       unsigned long long flags)
{
	struct mpsd_shortage shortage = { .bytes = size };
	CUresult result;

	do
		result = inner_cuMemCreate(handle, size, prop, flags);
	while (mpsd_exact_has_more_room(&result, &shortage));
	/* What was freed is so when the copy of the driver that was left has let go of it too. */
	if (result == CUDA_ERROR_OUT_OF_MEMORY && mpsd_unmapping_await(FENCE_MS))
		result = inner_cuMemCreate(handle, size, prop, flags);
	return result;
}

static bool export(CUmemGenericAllocationHandle native, int *fd)
{
	bool turn = mpsd_turn_take(), is;

	is = real_cuMemExportToShareableHandle(fd, native, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS;
	mpsd_turn_give(turn);
	if (!is)
		return false;
	mpsd_descriptors_given(*fd);
	*fd = mpsd_kept_high(*fd);
	return *fd >= 0;
}

/*
 * Locked. What a later copy answers may be the name of something that an earlier one gave, and what the first one answers
 * that of something that the program has retained alone, and the driver let go.
 */
static CUmemGenericAllocationHandle name_for(CUmemGenericAllocationHandle native, bool goes_along)
{
	static uint64_t used;

	return (goes_along && mpsd_tables()->moves) || find_any(native) ? FIRST_NAME + ++used : native;
}

/* Locked. `fd`: -1: it has none, and does not go along. False: no memory. */
static bool note_block(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, int fd)
{
	struct mpsd_block *block = malloc(sizeof(*block));
	CUmemGenericAllocationHandle native = *handle;

	if (!block)
		return false;
	*block = (struct mpsd_block){ NULL, name_for(native, fd >= 0), native, mpsd_tables()->moves, 1, 1, 0, fd, fd < 0, size,
				      *prop };
	block->next = blocks[mpsd_vmm_bucket(block->name)];
	blocks[mpsd_vmm_bucket(block->name)] = block;
	*handle = block->name;
	return true;
}

/* Of what the driver has made. `goes_along`: the next copy can have it too, if it can be exported. */
static CUresult created(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, bool goes_along)
{
	CUresult result = CUDA_SUCCESS;
	int fd = -1;
	bool is, turn;

	if (!goes_along && !is_of_host(prop))
		result = mpsd_line_made(result, mpsd_vmm_outside);
	if (result != CUDA_SUCCESS || !mpsd_vmm_enter()) {
		turn = mpsd_turn_take();
		inner_cuMemRelease(*handle);
		mpsd_turn_give(turn);
		return MPSD_AGAIN;
	}
	if (goes_along && !export(*handle, &fd))
		fd = -1;
	is = note_block(handle, size, prop, fd);
	if (!is && fd >= 0)
		close(fd);
	mpsd_vmm_leave(result);
	return is && (fd >= 0 || !goes_along) ? result : mpsd_line_made(result, "memory that cannot be exported");
}

CUresult make_cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
			  unsigned long long flags)
{
	CUmemAllocationProp wide;
	CUresult result;

	if (handle && prop && is_carried(prop)) {
		wide = *prop;
		wide.requestedHandleTypes |= CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
		result = create(handle, size, &wide, flags);
		if (result == CUDA_SUCCESS)
			return created(handle, size, prop, true);
		if (result == CUDA_ERROR_OUT_OF_MEMORY || result == MPSD_AGAIN || mpsd_is_loss(result))
			return result;
	}
	/* With the handles that it wants alone, or as the driver has it. */
	result = inner_cuMemCreate(handle, size, prop, flags);
	return result == CUDA_SUCCESS ? created(handle, size, prop, false) : result;
}

void mpsd_block_retained(CUmemGenericAllocationHandle *handle)
{
	const CUmemAllocationProp unknown = { 0 };

	for (unsigned int i = 0; i < MPSD_VMM_BUCKETS; i++) {
		for (struct mpsd_block *block = blocks[i]; block; block = block->next) {
			if (block->moves != mpsd_tables()->moves || !block->natives || block->native != *handle)
				continue;
			block->names++;
			block->natives++;
			*handle = block->name;
			return;
		}
	}
	note_block(handle, 0, &unknown, -1);
}

static CUresult native_of_this_copy(struct mpsd_block *block)
{
	CUresult result;

	if (block->is_anew)
		return real_cuMemCreate(&block->native, block->size, &block->property, 0);
	result = real_cuMemImportFromShareableHandle(&block->native, (void *)(uintptr_t)block->fd,
						     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	mpsd_descriptors_given(block->fd);
	return result;
}

/* Locked: what the copy in use calls it. */
CUresult mpsd_block_native(struct mpsd_block *block, CUmemGenericAllocationHandle *native)
{
	CUresult result = CUDA_SUCCESS;

	if (block->moves != mpsd_tables()->moves || !block->natives) {
		result = native_of_this_copy(block);
		block->moves = mpsd_tables()->moves;
		block->natives = result == CUDA_SUCCESS;
	}
	*native = block->native;
	return result;
}

/* Those that the copy in use has given beyond those that the program has. */
static CUresult release_natives(struct mpsd_block *block, unsigned int names)
{
	CUresult result = CUDA_SUCCESS;
	bool turn;

	while (block->moves == mpsd_tables()->moves && block->natives > names && result == CUDA_SUCCESS) {
		turn = mpsd_turn_take();
		result = inner_cuMemRelease(block->native);
		mpsd_turn_give(turn);
		block->natives -= result == CUDA_SUCCESS;
	}
	return result;
}

CUresult make_cuMemRelease(CUmemGenericAllocationHandle handle)
{
	struct mpsd_block *block;
	CUresult result;

	if (!mpsd_vmm_enter())
		return MPSD_AGAIN;
	block = mpsd_block_find(handle);
	if (!block)
		return mpsd_vmm_leave(inner_cuMemRelease(handle));
	result = release_natives(block, block->names - 1);
	if (result == CUDA_SUCCESS) {
		block->names--;
		mpsd_block_drop_if_unused(block);
	}
	return mpsd_vmm_leave(result);
}

CUresult make_cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
					   CUmemAllocationHandleType handleType, unsigned long long flags)
{
	CUmemGenericAllocationHandle native = handle;
	CUresult result = CUDA_SUCCESS;
	struct mpsd_block *block;
	bool is_given;

	if (!mpsd_vmm_enter())
		return MPSD_AGAIN;
	block = mpsd_block_find(handle);
	/* It is exportable for this library alone. */
	if (block && !block->is_anew && !(block->property.requestedHandleTypes & handleType))
		return mpsd_vmm_leave(CUDA_ERROR_INVALID_VALUE);
	if (block && !block->is_anew && !flags && shareableHandle &&
	    handleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
		/* What was imported is not exported again. */
		*(int *)shareableHandle = fcntl(block->fd, F_DUPFD_CLOEXEC, 0);
		result = *(int *)shareableHandle < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
	} else {
		result = block ? mpsd_block_native(block, &native) : CUDA_SUCCESS;
		if (result == CUDA_SUCCESS)
			result = inner_cuMemExportToShareableHandle(shareableHandle, native, handleType, flags);
	}
	mpsd_vmm_leave(result);
	is_given = result == CUDA_SUCCESS;
	result = mpsd_line_made(result, "cuMemExportToShareableHandle");
	if (is_given && result != CUDA_SUCCESS && handleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		close(*(int *)shareableHandle);
	return result;
}

CUresult make_cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
	struct mpsd_block *block;

	if (!mpsd_vmm_enter())
		return MPSD_AGAIN;
	block = prop ? mpsd_block_find(handle) : NULL;
	if (!block || !block->size)
		return mpsd_vmm_leave(inner_cuMemGetAllocationPropertiesFromHandle(prop, block ? block->native : handle));
	*prop = block->property;
	return mpsd_vmm_leave(CUDA_SUCCESS);
}

CUmemGenericAllocationHandle *mpsd_vmm_take(size_t *count)
{
	CUmemGenericAllocationHandle *taken;
	size_t room = 0;

	*count = 0;
	for (unsigned int i = 0; i < MPSD_VMM_BUCKETS; i++)
		for (struct mpsd_block *block = blocks[i]; block; block = block->next)
			room += block->natives;
	taken = room ? malloc(room * sizeof(*taken)) : NULL;
	for (unsigned int i = 0; i < MPSD_VMM_BUCKETS; i++)
		for (struct mpsd_block *block = blocks[i]; block; block = block->next)
			for (; block->natives; block->natives--)
				if (taken)
					taken[(*count)++] = block->native;
	return taken;
}

void mpsd_vmm_child(void)
{
	for (unsigned int i = 0; i < MPSD_VMM_BUCKETS; i++) {
		for (struct mpsd_block *block = blocks[i]; block; block = block->next) {
			if (block->fd >= 0)
				close(block->fd);
			block->fd = -1;
		}
	}
}
