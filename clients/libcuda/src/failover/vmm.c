// SPDX-License-Identifier: MIT
/*
 * What the program reserves lies in a window, which all copies have at the same addresses; what it maps there is a
 * piece like others. Not followed: addresses outside of the windows.
 */
#include "failover/vmm.h"

#include <stdlib.h>

#include "failover/blocks.h"
#include "failover/line.h"
#include "failover/mirror.h"
#include "hold.h"
#include "turn.h"

static struct mapping {
	struct mapping *next;
	struct arena_range range;
	struct mpsd_block *block;
	struct mpsd_mapped mapped;
	bool is_open;		/* kernels may write there */
} *mappings[MPSD_VMM_BUCKETS];

static struct mapping **place_of(CUdeviceptr base)
{
	struct mapping **place = &mappings[mpsd_vmm_bucket(base)];

	while (*place && (*place)->range.base != base)
		place = &(*place)->next;
	return place;
}

bool mpsd_vmm_find(CUdeviceptr base, struct mpsd_mapped *mapped)
{
	const struct mapping *mapping = *place_of(base);

	if (mapping)
		*mapped = mapping->mapped;
	return mapping != NULL;
}

void mpsd_vmm_handle_types(CUdeviceptr address, unsigned long long *types)
{
	const struct mapping *mapping = NULL;
	struct arena_range piece;

	pthread_mutex_lock(&mpsd_windows_lock);
	if (mpsd_windows_piece(address, &piece))
		mapping = *place_of(piece.base);
	if (mapping)
		*types = mapping->block->property.requestedHandleTypes;
	pthread_mutex_unlock(&mpsd_windows_lock);
}

/* Addresses */

CUresult make_cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
				  unsigned long long flags)
{
	CUresult result = CUDA_ERROR_NOT_SUPPORTED;

	/* A place that the program would like is no more than a wish. */
	if (ptr && size && size % ARENA_GRANULE == 0 && !flags)
		result = mpsd_memory_hold(size, alignment, ptr);
	if (result == CUDA_SUCCESS || result == MPSD_AGAIN)
		return result;
	return mpsd_line_made(inner_cuMemAddressReserve(ptr, size, alignment, addr, flags), mpsd_vmm_outside);
}

CUresult make_cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
	CUresult result = mpsd_memory_let_go(ptr, size);

	return result == CUDA_ERROR_NOT_FOUND ? inner_cuMemAddressFree(ptr, size) : result;
}

/* Mappings */

/* Locked, behind the driver's own. False: no memory. */
static bool note_mapping(struct arena_range range, struct mpsd_block *block)
{
	struct mapping *mapping = calloc(1, sizeof(*mapping));

	if (!mapping || !mpsd_windows_map(range)) {
		free(mapping);
		return false;
	}
	*mapping = (struct mapping){ NULL, range, block, { .fd = block->fd }, false };
	*place_of(range.base) = mapping;
	block->mappings++;
	mpsd_mirror_mapped(range, mpsd_windows_device(range.base), &mapping->mapped);
	return true;
}

CUresult make_cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
		       unsigned long long flags)
{
	struct arena_range range = { ptr, size };
	CUmemGenericAllocationHandle native = handle;
	CUresult result = CUDA_SUCCESS;
	struct mpsd_block *block;
	bool is_ours;

	if (!mpsd_vmm_enter())
		return MPSD_AGAIN;
	block = mpsd_block_find(handle);
	is_ours = block && !block->is_anew && !offset && !flags && mpsd_windows_may_map(range);
	if (block)
		result = mpsd_block_native(block, &native);
	if (result == CUDA_SUCCESS)
		result = inner_cuMemMap(ptr, size, offset, native, flags);
	if (result == CUDA_SUCCESS && is_ours && !note_mapping(range, block)) {
		inner_cuMemUnmap(ptr, size);
		result = CUDA_ERROR_OUT_OF_MEMORY;
	}
	mpsd_vmm_leave(result);
	return is_ours ? result : mpsd_line_made(result, mpsd_vmm_outside);
}

/* Whether it consists of whole mappings of ours. */
static bool are_whole(CUdeviceptr ptr, size_t size)
{
	CUdeviceptr at = ptr;
	const struct mapping *mapping;

	while (at < ptr + size && (mapping = *place_of(at)) && mapping->range.size <= ptr + size - at)
		at += mapping->range.size;
	return size && at == ptr + size;
}

/* The first mapping of ours from that address on in a range, whatever lies between; NULL: there is none. */
static struct mapping *next_in(CUdeviceptr at, struct arena_range range)
{
	CUdeviceptr end = range.base + range.size;
	struct mapping *mapping = NULL;

	for (; at < end && !mapping; at += ARENA_GRANULE)
		mapping = *place_of(at);
	return mapping && mapping->range.base + mapping->range.size <= end ? mapping : NULL;
}

/* Of the window's own device. */
static void open_or_close(struct mapping *mapping)
{
	const struct mpsd_mapped *mapped = &mapping->mapped;
	bool is = false;

	for (unsigned int i = 0; i < mapped->accesses; i++)
		if (mapped->access[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
		    mapped->access[i].location.id == mpsd_windows_device(mapping->range.base))
			is = mapped->access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	if (is != mapping->is_open)
		mpsd_windows_open(mapping->range, is);
	mapping->is_open = is;
}

static void note_access(struct mpsd_mapped *mapped, const CUmemAccessDesc *desc)
{
	unsigned int at = 0;

	while (at < mapped->accesses && (mapped->access[at].location.type != desc->location.type ||
					 mapped->access[at].location.id != desc->location.id))
		at++;
	if (at == MPSD_MOST_ACCESSES) {
		mpsd_line_opaque("memory that too many devices may access");
		return;
	}
	mapped->access[at] = *desc;
	mapped->accesses += at == mapped->accesses;
}

struct access {
	CUdeviceptr ptr;
	size_t size, count;
	const CUmemAccessDesc *desc;
};

static CUresult set_access(const void *with)
{
	const struct access *access = with;
	const CUmemAccessDesc *desc = access->desc;
	CUdeviceptr ptr = access->ptr;
	size_t size = access->size, count = access->count;
	struct arena_range range = { ptr, size };
	CUresult result;
	bool is_ours;

	if (!mpsd_vmm_enter())
		return MPSD_AGAIN;
	is_ours = are_whole(ptr, size);
	result = inner_cuMemSetAccess(ptr, size, desc, count);
	if (result == CUDA_SUCCESS) {
		for (struct mapping *mapping = next_in(ptr, range); mapping;
		     mapping = next_in(mapping->range.base + mapping->range.size, range)) {
			for (size_t i = 0; i < count; i++)
				note_access(&mapping->mapped, &desc[i]);
			open_or_close(mapping);
		}
		mpsd_undo_runs_changed();
	}
	if (result == CUDA_SUCCESS && is_ours)
		mpsd_mirror_access(range, mpsd_windows_device(ptr), desc, count);
	mpsd_vmm_leave(result);
	return is_ours ? result : mpsd_line_made(result, mpsd_vmm_outside);
}

/* Where less is allowed than was, what was saved there could not be put back any more. */
CUresult make_cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
	struct access access = { ptr, size, count, desc };
	bool is_less = false;

	for (size_t i = 0; desc && i < count; i++)
		is_less = is_less || desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	return is_less ? mpsd_exact_without_work(set_access, &access) : set_access(&access);
}

static void forget_mapping(CUdeviceptr base)
{
	struct mapping **place = place_of(base), *gone = *place;

	*place = gone->next;
	if (gone->is_open)
		mpsd_windows_open(gone->range, false);
	mpsd_mirror_gone(gone->range);
	mpsd_windows_unmap(gone->range);
	gone->block->mappings--;
	mpsd_block_drop_if_unused(gone->block);
	free(gone);
}

static CUresult unmap(const void *with)
{
	struct arena_range range = *(const struct arena_range *)with;
	struct mapping *mapping;
	CUresult result;
	bool turn;

	if (!mpsd_vmm_enter())
		return MPSD_AGAIN;
	turn = mpsd_turn_take();
	result = inner_cuMemUnmap(range.base, range.size);
	mpsd_turn_give(turn);
	mapping = result == CUDA_SUCCESS ? next_in(range.base, range) : NULL;
	while (mapping) {
		struct arena_range gone = mapping->range;

		forget_mapping(gone.base);
		mapping = next_in(gone.base + gone.size, range);
	}
	return mpsd_vmm_leave(result);
}

/* What was saved there could not be put back any more. */
CUresult make_cuMemUnmap(CUdeviceptr ptr, size_t size)
{
	struct arena_range range = { ptr, size };

	return mpsd_exact_without_work(unmap, &range);
}

/* It may be an allocation, which has none: so the proxy says, with that lock. */
static CUresult retain_outside(CUmemGenericAllocationHandle *handle, void *addr)
{
	CUresult result = mpsd_line_made(inner_cuMemRetainAllocationHandle(handle, addr), mpsd_vmm_outside);

	if (result != CUDA_SUCCESS)
		return result;
	if (!mpsd_vmm_enter())
		return MPSD_AGAIN;
	mpsd_block_retained(handle);
	return mpsd_vmm_leave(result);
}

CUresult make_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
	struct arena_range piece;
	struct mapping *mapping;

	if (!mpsd_vmm_enter())
		return MPSD_AGAIN;
	mapping = handle && mpsd_windows_piece((CUdeviceptr)addr, &piece) ? *place_of(piece.base) : NULL;
	if (!mapping) {
		mpsd_vmm_leave(CUDA_SUCCESS);
		return retain_outside(handle, addr);
	}
	mapping->block->names++;
	*handle = mapping->block->name;
	return mpsd_vmm_leave(CUDA_SUCCESS);
}
