// SPDX-License-Identifier: MIT
/*
 * All memory that the driver gave out, sorted by address. Reserved ranges lie in one list with what
 * is mapped inside them, so several ranges may contain an address; there are few, and few levels.
 */
#include <stdlib.h>
#include <string.h>

#include "standin.h"

static struct range *ranges;
static size_t count, room;

/* The position of the first range whose base is above `address`. */
static size_t above(uintptr_t address)
{
	size_t low = 0, high = count;

	while (low < high) {
		size_t middle = (low + high) / 2;

		if (ranges[middle].base > address)
			high = middle;
		else
			low = middle + 1;
	}
	return low;
}

struct range *range_at(uintptr_t address, enum range_kind first, enum range_kind last)
{
	for (size_t i = above(address); i-- > 0;)
		if (ranges[i].kind >= first && ranges[i].kind <= last &&
		    address - ranges[i].base < ranges[i].size)
			return &ranges[i];
	return NULL;
}

struct range *range_from(uintptr_t base, enum range_kind kind)
{
	for (size_t i = above(base); i-- > 0 && ranges[i].base == base;)
		if (ranges[i].kind == kind)
			return &ranges[i];
	return NULL;
}

CUresult add_range(struct range range)
{
	static unsigned long long last_id;
	size_t at = above(range.base);

	if (count == room) {
		size_t more = room ? 2 * room : 64;
		struct range *larger = realloc(ranges, more * sizeof(*ranges));

		if (!larger)
			return CUDA_ERROR_OUT_OF_MEMORY;
		ranges = larger;
		room = more;
	}
	memmove(ranges + at + 1, ranges + at, (count - at) * sizeof(*ranges));
	range.id = ++last_id;
	range.device = current_device();
	ranges[at] = range;
	count++;
	return CUDA_SUCCESS;
}

void remove_range(struct range *range)
{
	size_t at = (size_t)(range - ranges);

	memmove(ranges + at, ranges + at + 1, (count - at - 1) * sizeof(*ranges));
	count--;
}

struct range *next_range(uintptr_t address, enum range_kind kind)
{
	for (size_t i = address ? above(address - 1) : 0; i < count; i++)
		if (ranges[i].kind == kind)
			return &ranges[i];
	return NULL;
}

struct range *first_range(enum range_kind kind, CUdevice device)
{
	struct range *range = next_range(0, kind);

	while (range && range->device != device)
		range = next_range(range->base + 1, kind);
	return range;
}

bool is_range_free(uintptr_t base, size_t size, enum range_kind kind)
{
	for (size_t i = above(base + size - 1); i-- > 0;)
		if (ranges[i].kind == kind && ranges[i].base + ranges[i].size > base)
			return false;
	return true;
}

void forget_ranges(void)
{
	free(ranges);
	ranges = NULL;
	count = room = 0;
}

/* Copies go anywhere, by whatever way; a kernel goes where its device has been let. */
static bool is_let(const struct range *range, CUcontext context)
{
	uint32_t own = 1u << context->device;

	if (range->kind == RANGE_MAPPED)
		return range->devices & own;
	if (range->kind == RANGE_DEVICE || range->kind == RANGE_OPENED)
		return (own | context->peers) >> range->device & 1;
	return true;
}

/* Neighbours may carry an access together, as two mappings of one reservation do. */
size_t accessible(uintptr_t address, size_t size, enum access access, CUcontext context)
{
	uintptr_t at = address, end = address + size;

	if (end < address)
		return 0;
	while (at < end) {
		struct range *range = range_at(at, RANGE_DEVICE, RANGE_REGISTERED);

		if (!range)
			range = range_at(at, RANGE_MAPPED, RANGE_MAPPED);
		if (!range || !(access == ACCESS_WRITE ? range->writable : range->readable) ||
		    (context && !is_let(range, context)))
			return at - address;
		at = range->base + range->size;
	}
	return size;
}

void *gpu_pointer(uintptr_t address)
{
	struct range *reserved = NULL;

	if (!range_at(address, RANGE_DEVICE, RANGE_REGISTERED))
		reserved = range_at(address, RANGE_RESERVED, RANGE_RESERVED);
	return reserved ? reserved->alias + (address - reserved->base) : (void *)address;
}

bool may_access(uintptr_t address, size_t size, enum access access)
{
	return accessible(address, size, access, NULL) == size;
}
