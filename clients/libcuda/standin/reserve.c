// SPDX-License-Identifier: MIT
/*
 * Reserved addresses. What a reservation takes of the process is a placeholder, inaccessible memory at the
 * place itself, as on a GPU; who unmaps that behind the driver's back takes nothing away from this copy's
 * GPU, and another copy may then reserve the same place on its own. So memory is not mapped there but in
 * the reservation's alias, somewhere else, where kernels and copies of this copy find it.
 */
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "standin.h"

/* Measured on a driver: the hint of a small reservation is ignored, that of a large one is kept. */
#define HINT_FROM ((size_t)64 << 20)
#define MOST_OBJECTS 512
#define MOST_REFUSED 16
#define MOST_TAKEN 64

typedef void (*placeholder_lost)(uintptr_t base, size_t size);

/* Another copy has a placeholder there now: ours, if there was one, is no more. */
static void lose_placeholder(uintptr_t base, size_t size)
{
	uintptr_t at = 0;
	struct range *range;

	pthread_mutex_lock(&gpu_lock);
	while ((range = next_range(at, RANGE_RESERVED)) && range->base < base + size) {
		if (range->base + range->size > base)
			range->placeholder = false;
		at = range->base + 1;
	}
	pthread_mutex_unlock(&gpu_lock);
}

/* What copies know each other by. A datum: the proxy makes stubs for functions. */
extern API const placeholder_lost standin_placeholder_lost;
const placeholder_lost standin_placeholder_lost = lose_placeholder;

struct objects {
	char *names[MOST_OBJECTS];
	size_t count;
};

static int note_object(struct dl_phdr_info *info, size_t size, void *data)
{
	struct objects *objects = data;

	(void)size;
	if (info->dlpi_name && *info->dlpi_name && objects->count < MOST_OBJECTS)
		objects->names[objects->count++] = strdup(info->dlpi_name);
	return 0;
}

/* The lock is not held: two copies may tell each other. */
static void tell_other_copies(uintptr_t base, size_t size)
{
	struct objects objects = { .count = 0 };

	dl_iterate_phdr(note_object, &objects);
	while (objects.count--) {
		char *name = objects.names[objects.count];
		void *handle = name ? dlopen(name, RTLD_LAZY | RTLD_NOLOAD) : NULL;
		placeholder_lost *lost = handle ? dlsym(handle, "standin_placeholder_lost") : NULL;

		if (lost && lost != &standin_placeholder_lost)
			(*lost)(base, size);
		if (handle)
			dlclose(handle);
		free(name);
	}
}

/* Measured: a place that was mapped without access when the context was made is not asked for. */
static struct {
	uintptr_t begin, end;
} taken[MOST_TAKEN];
static size_t taken_count;

void note_taken(void)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	char line[512];

	taken_count = 0;
	while (maps && taken_count < MOST_TAKEN && fgets(line, sizeof(line), maps)) {
		unsigned long begin, end;
		char access[5];

		if (sscanf(line, "%lx-%lx %4s", &begin, &end, access) != 3 || strncmp(access, "---", 3) != 0 ||
		    end - begin < HINT_FROM)
			continue;
		taken[taken_count].begin = begin;
		taken[taken_count++].end = end;
	}
	if (maps)
		fclose(maps);
}

static bool is_taken(uintptr_t begin, size_t size)
{
	for (size_t i = 0; i < taken_count; i++)
		if (begin < taken[i].end && begin + size > taken[i].begin)
			return true;
	return false;
}

static void *take(void *hint, size_t size)
{
	void *at = mmap(hint, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return at == MAP_FAILED ? NULL : at;
}

/* More than is asked for, so that an aligned part of it can be kept. */
static char *take_aligned(size_t size, size_t alignment)
{
	size_t whole = size + alignment;
	char *at = take(NULL, whole), *start;

	if (!at)
		return NULL;
	start = (char *)(((uintptr_t)at + alignment - 1) / alignment * alignment);
	if (start > at)
		munmap(at, (size_t)(start - at));
	if (at + whole > start + size)
		munmap(start + size, (size_t)(at + whole - (start + size)));
	return start;
}

static char *take_placeholder(size_t size, size_t alignment, void *hint)
{
	char *at;

	/* A plain hint and a look: ThreadSanitizer turns a fixed one that it dislikes into address 0. */
	if (hint && size >= HINT_FROM && !((uintptr_t)hint % GRANULARITY) && !is_taken((uintptr_t)hint, size)) {
		at = take(hint, size);
		if (at == hint)
			return at;
		if (at)
			munmap(at, size);
	}
	return take_aligned(size, alignment);
}

/* Where a placeholder was unmapped the host has room, and this copy's GPU has none. */
static char *take_free_placeholder(size_t size, size_t alignment, void *hint)
{
	char *refused[MOST_REFUSED], *at;
	size_t count = 0;

	while ((at = take_placeholder(size, alignment, hint)) &&
	       !is_range_free((uintptr_t)at, size, RANGE_RESERVED)) {
		refused[count++] = at;
		hint = at = NULL;
		if (count == MOST_REFUSED)
			break;
	}
	while (count--)
		munmap(refused[count], size);
	return at;
}

API CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
				 unsigned long long flags)
{
	struct range range = { .size = size, .kind = RANGE_RESERVED, .placeholder = true };
	CUresult result = is_initialised();
	char *at;

	if (result != CUDA_SUCCESS)
		return result;
	if (alignment < GRANULARITY)
		alignment = GRANULARITY;
	if (!ptr || !size || size % GRANULARITY || (alignment & (alignment - 1)) || flags)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&gpu_lock);
	at = take_free_placeholder(size, alignment, (void *)addr);
	range.base = (uintptr_t)at;
	range.alias = at ? take(NULL, size) : NULL;
	result = range.alias ? add_range(range) : CUDA_ERROR_OUT_OF_MEMORY;
	if (result != CUDA_SUCCESS) {
		if (at)
			munmap(at, size);
		if (range.alias)
			munmap(range.alias, size);
		return leave(result);
	}
	leave(CUDA_SUCCESS);
	tell_other_copies(range.base, size);
	*ptr = range.base;
	return CUDA_SUCCESS;
}

static void give_back(struct range *range)
{
	if (range->placeholder)
		munmap((void *)range->base, range->size);
	munmap(range->alias, range->size);
	remove_range(range);
}

API CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
	struct range *range;

	pthread_rwlock_wrlock(&gpu_memory);
	pthread_mutex_lock(&gpu_lock);
	range = range_from(ptr, RANGE_RESERVED);
	if (range && range->size == size && is_range_free(ptr, size, RANGE_MAPPED))
		give_back(range);
	else
		range = NULL;
	pthread_mutex_unlock(&gpu_lock);
	pthread_rwlock_unlock(&gpu_memory);
	return range ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void close_reservations(void)
{
	struct range *range;

	while ((range = next_range(0, RANGE_RESERVED)))
		give_back(range);
}
