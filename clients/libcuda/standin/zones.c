// SPDX-License-Identifier: MIT
/*
 * Ranges of addresses that absorb stray accesses. No driver has these functions: they stand for what a
 * process does with its own descriptor of /dev/nvidia-uvm, which the stand-in has none of. A managed range
 * (an mmap of that descriptor) reports what it absorbs, a sparse one (two ioctls) does not; who hears of it
 * is the back end's business.
 */
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "standin.h"

#define NULL_PAGE ((size_t)64 << 10)
#define SPARSE_GRANULE ((size_t)64 << 10)

API CUresult standinManagedRange(CUdeviceptr base, size_t size);
API CUresult standinSparseRange(CUdeviceptr base, size_t size);
API CUresult standinFreeRange(CUdeviceptr base, size_t size);

/* As the kernel has it: only some processes may map there. Past ThreadSanitizer, which no process may. */
static bool take_null_page(void)
{
	return !syscall(SYS_mmap, NULL, NULL_PAGE, PROT_NONE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
}

static void give_null_page(void)
{
	syscall(SYS_munmap, NULL, NULL_PAGE);
}

static bool is_all_free(CUdeviceptr base, size_t size)
{
	static const enum range_kind kinds[] = {
		RANGE_DEVICE, RANGE_OPENED, RANGE_HOST, RANGE_REGISTERED, RANGE_MAPPED, RANGE_MANAGED, RANGE_SPARSE,
	};

	for (size_t i = 0; i < sizeof(kinds) / sizeof(*kinds); i++)
		if (!is_range_free(base, size, kinds[i]))
			return false;
	return true;
}

/* Over a part of a reservation; a sparse one also where the host has memory, or nothing (measured). */
static bool may_lie_at(CUdeviceptr base, size_t size, enum range_kind kind)
{
	struct range *reserved = range_at(base, RANGE_RESERVED, RANGE_RESERVED);
	bool within = reserved && base + size <= reserved->base + reserved->size;

	if (!within && (kind != RANGE_SPARSE || !is_range_free(base, size, RANGE_RESERVED)))
		return false;
	return is_all_free(base, size);
}

static CUresult lay(CUdeviceptr base, size_t size, enum range_kind kind)
{
	CUresult result;

	if (!backend->cover(base, size, kind == RANGE_MANAGED))
		return CUDA_ERROR_INVALID_VALUE;
	result = add_range((struct range){ .base = base, .size = size, .kind = kind });
	if (result != CUDA_SUCCESS)
		backend->uncover(base, size, kind == RANGE_MANAGED);
	return result;
}

static CUresult lay_at(CUdeviceptr base, size_t size, enum range_kind kind)
{
	return may_lie_at(base, size, kind) ? lay(base, size, kind) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult standinManagedRange(CUdeviceptr base, size_t size)
{
	CUresult result;

	if (!size || base % 4096 || size % 4096)
		return CUDA_ERROR_INVALID_VALUE;
	gate_keep(GATE_LAY);
	pthread_mutex_lock(&gpu_lock);
	if (base)
		return leave(lay_at(base, size, RANGE_MANAGED));
	if (size != NULL_PAGE || range_from(0, RANGE_MANAGED) || !take_null_page())
		return leave(CUDA_ERROR_NOT_PERMITTED);
	result = lay(base, size, RANGE_MANAGED);
	if (result != CUDA_SUCCESS)
		give_null_page();
	return leave(result);
}

API CUresult standinSparseRange(CUdeviceptr base, size_t size)
{
	if (!base || !size || base % SPARSE_GRANULE || size % SPARSE_GRANULE)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&gpu_lock);
	return leave(lay_at(base, size, RANGE_SPARSE));
}

static void take_away(struct range *range)
{
	backend->uncover(range->base, range->size, range->kind == RANGE_MANAGED);
	if (!range->base)
		give_null_page();
	remove_range(range);
}

/* With the bounds that it was laid with. */
API CUresult standinFreeRange(CUdeviceptr base, size_t size)
{
	struct range *range;

	pthread_mutex_lock(&gpu_lock);
	range = range_from(base, RANGE_MANAGED);
	if (!range)
		range = range_from(base, RANGE_SPARSE);
	if (!range || range->size != size)
		return leave(CUDA_ERROR_INVALID_VALUE);
	take_away(range);
	return leave(CUDA_SUCCESS);
}

/* They end with the context. */
void close_zones(CUdevice device)
{
	struct range *range;

	while ((range = first_range(RANGE_MANAGED, device)) || (range = first_range(RANGE_SPARSE, device)))
		take_away(range);
}
