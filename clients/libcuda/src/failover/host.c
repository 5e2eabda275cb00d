// SPDX-License-Identifier: MIT
/* Host memory that the GPU reaches, and what is asked about pointers. */
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "exact/state.h"
#include "failover/line.h"
#include "failover/made.h"
#include "failover/pins.h"

/* What both calls know: a standby's copy registers the same pages. */
#define REGISTER_FLAGS (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP)

/* The record's value: who allocated them. */
#define FIRST_COPYS 0
#define PROGRAMS (-1)
#define OWN_PAGES (-2)

/* All of them. The records have a lock that is held for long while a standby is made. */
static pthread_rwlock_t pins_lock = PTHREAD_RWLOCK_INITIALIZER;
static struct pin {
	struct pin *next;
	uintptr_t base;
	size_t size;
} *pins;

static bool pin(const void *base, size_t size)
{
	struct pin *made = malloc(sizeof(*made));

	if (!made)
		return false;
	pthread_rwlock_wrlock(&pins_lock);
	*made = (struct pin){ pins, (uintptr_t)base, size };
	pins = made;
	pthread_rwlock_unlock(&pins_lock);
	return true;
}

void mpsd_pins_forget(const void *base)
{
	struct pin **link = &pins, *gone;

	pthread_rwlock_wrlock(&pins_lock);
	while (*link && (*link)->base != (uintptr_t)base)
		link = &(*link)->next;
	gone = *link;
	if (gone)
		*link = gone->next;
	pthread_rwlock_unlock(&pins_lock);
	free(gone);
}

MPSD_READ_OFTEN struct mpsd_span mpsd_pins_span = MPSD_NO_SPAN;

bool mpsd_is_pinned(const void *address)
{
	uintptr_t at = (uintptr_t)address;
	bool is = false;

	if (!mpsd_span_may_hold(&mpsd_pins_span, at))
		return false;
	pthread_rwlock_rdlock(&pins_lock);
	for (const struct pin *each = pins; each && !is; each = each->next)
		is = at - each->base < each->size;
	pthread_rwlock_unlock(&pins_lock);
	return is;
}

bool mpsd_pins_lie_in(uint64_t start, uint64_t end)
{
	bool are = false;

	pthread_rwlock_rdlock(&pins_lock);
	for (const struct pin *each = pins; each && !are; each = each->next)
		are = each->base < end && start < each->base + each->size;
	pthread_rwlock_unlock(&pins_lock);
	return are;
}

/* In a forked child, where another thread of the parent's may have had it. */
void mpsd_pins_child(void)
{
	pins_lock = (pthread_rwlock_t)PTHREAD_RWLOCK_INITIALIZER;
}

/* A move that does not come about leaves the copy in use, where pages are not registered twice. */
static void unregister_again(void *pages, int whose)
{
	if (whose != FIRST_COPYS && !mpsd_is_left())
		inner_cuMemHostUnregister(pages);
}

static CUresult note_pages(CUresult result, void *pages, size_t size, unsigned int flags, int whose, uint64_t moves)
{
	struct mpsd_made record = {
		.kind = MPSD_MADE_HOST, .native = mpsd_made_pages(pages), .size = size, .flags = flags & REGISTER_FLAGS,
		.value = whose,
	};

	if (result != CUDA_SUCCESS)
		return result;
	if (!pin(pages, size))
		mpsd_line_opaque("out of host memory");
	mpsd_span_widen(&mpsd_pins_span, (uintptr_t)pages, size);
	if (mpsd_made_add(&record, moves))
		return result;
	mpsd_pins_forget(pages);
	unregister_again(pages, whose);
	return MPSD_AGAIN;
}

static CUresult first_pages(CUresult result, void **pp, size_t size, unsigned int flags, uint64_t moves)
{
	return note_pages(result, result == CUDA_SUCCESS ? *pp : NULL, size, flags, FIRST_COPYS, moves);
}

/* What a later copy allocated would go with it; the process's own pages stay, registered with whichever is in use. */
static CUresult own_pages(void **pp, size_t size, unsigned int flags, uint64_t moves)
{
	struct mpsd_made record = { .kind = MPSD_MADE_HOST, .size = size, .flags = flags & REGISTER_FLAGS,
				    .value = OWN_PAGES };
	void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CUresult result;

	if (pages == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = inner_cuMemHostRegister_v2(pages, size, record.flags);
	record.native = mpsd_made_pages(pages);
	if (result == CUDA_SUCCESS && !pin(pages, size))
		mpsd_line_opaque("out of host memory");
	mpsd_span_widen(&mpsd_pins_span, (uintptr_t)pages, size);
	if (result == CUDA_SUCCESS && !mpsd_made_add(&record, moves)) {
		unregister_again(pages, OWN_PAGES);
		result = MPSD_AGAIN;
	}
	if (result != CUDA_SUCCESS) {
		mpsd_pins_forget(pages);
		munmap(pages, size);
	} else {
		*pp = pages;
	}
	return result;
}

CUresult make_cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags)
{
	uint64_t moves = mpsd_tables()->moves;

	if (moves && pp && bytesize)
		return own_pages(pp, bytesize, Flags, moves);
	return first_pages(inner_cuMemHostAlloc(pp, bytesize, Flags), pp, bytesize, Flags, moves);
}

CUresult make_cuMemAllocHost_v2(void **pp, size_t bytesize)
{
	uint64_t moves = mpsd_tables()->moves;

	if (moves && pp && bytesize)
		return own_pages(pp, bytesize, 0, moves);
	return first_pages(inner_cuMemAllocHost_v2(pp, bytesize), pp, bytesize, 0, moves);
}

CUresult make_cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags)
{
	uint64_t moves = mpsd_tables()->moves;
	CUresult result = inner_cuMemHostRegister_v2(p, bytesize, Flags);

	if (result == CUDA_SUCCESS && Flags & ~(unsigned int)REGISTER_FLAGS)
		mpsd_line_opaque("cuMemHostRegister of memory that the process does not own");
	return note_pages(result, p, bytesize, Flags, PROGRAMS, moves);
}

/* Of size 0: nothing is known of them. */
static struct mpsd_made known_pages(void *pages)
{
	struct mpsd_made found = { .size = 0 }, *made;

	mpsd_made_lock();
	made = mpsd_made_find(mpsd_made_pages(pages));
	if (made)
		found = *made;
	mpsd_made_unlock();
	return found;
}

/* Before the driver was asked they were forgotten as pinned ones; whether it has left them as they were. */
static bool are_left(CUresult result, void *pages)
{
	struct mpsd_made left = { .size = 0 };

	if (result != CUDA_SUCCESS)
		left = known_pages(pages);
	if (left.size && !pin(pages, left.size))
		mpsd_line_opaque("out of host memory");
	return left.size != 0;
}

CUresult make_cuMemHostUnregister(void *p)
{
	uint64_t moves = mpsd_tables()->moves;
	struct mpsd_made was = known_pages(p);
	CUresult result;

	/* The first copy knows what it has allocated; a later one has all of it registered. */
	if (was.size && was.value != PROGRAMS)
		return moves ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : inner_cuMemHostUnregister(p);
	if (!mpsd_made_end(mpsd_made_pages(p), moves))
		return MPSD_AGAIN;
	mpsd_pins_forget(p);
	result = mpsd_made_ended(inner_cuMemHostUnregister(p), moves);
	are_left(result, p);
	return result;
}

/* What the first copy allocated stays the program's until it ends, once another one is in use. */
CUresult make_cuMemFreeHost(void *p)
{
	uint64_t moves = mpsd_tables()->moves;
	struct mpsd_made was = known_pages(p);
	CUresult result;

	if (was.size && was.value == PROGRAMS)
		return moves ? CUDA_ERROR_INVALID_VALUE : inner_cuMemFreeHost(p);
	if (!mpsd_made_end(mpsd_made_pages(p), moves))
		return MPSD_AGAIN;
	mpsd_pins_forget(p);
	result = mpsd_made_ended(was.size && moves ? inner_cuMemHostUnregister(p) : inner_cuMemFreeHost(p), moves);
	if (!are_left(result, p) && was.value == OWN_PAGES)
		munmap(p, was.size);
	return result;
}

CUresult make_cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes, void **data,
				     CUdeviceptr ptr)
{
	CUresult result = inner_cuPointerGetAttributes(numAttributes, attributes, data, ptr);

	for (unsigned int i = 0; result == CUDA_SUCCESS && i < numAttributes; i++)
		if (attributes[i] == CU_POINTER_ATTRIBUTE_CONTEXT)
			*(CUcontext *)data[i] = mpsd_name(*(CUcontext *)data[i]);
	return mpsd_answered(result);
}

CUresult make_cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	CUresult result = inner_cuPointerGetAttribute(data, attribute, ptr);

	if (result == CUDA_SUCCESS && attribute == CU_POINTER_ATTRIBUTE_CONTEXT)
		*(CUcontext *)data = mpsd_name(*(CUcontext *)data);
	return mpsd_answered(result);
}
