// SPDX-License-Identifier: MIT
/*
 * Addresses are given out in a row, and those at the end are followed by those at the beginning: a place that is in
 * use is passed over. A hint, not MAP_FIXED: the kernel takes it where there is room, and nothing is ever replaced.
 */
#include "place.h"
#include "debug.h"

#include <stdatomic.h>
#include <sys/mman.h>


/* Behind the windows (window.c), where processes of PyTorch, CuPy and JAX had nothing either. */
#define USUAL_BASE ((uint64_t)0x280000000000)
#define USUAL_SIZE ((uint64_t)1 << 44)
/* One that was chosen may lie between others. */
#define CHOSEN_SIZE ((uint64_t)1 << 40)
#define LOWEST ((uint64_t)8 << 30)
#define END_OF_ADDRESSES ((uint64_t)1 << 47)
#define STEP ((uint64_t)2 << 20)
#define TRIES 22	/* the leaps between them come to half of the area */
/* On x86 alone. */
#ifndef MAP_32BIT
#define MAP_32BIT 0
#endif
#define OWN_PLACE (MAP_FIXED | MAP_FIXED_NOREPLACE | MAP_32BIT | MAP_GROWSDOWN)

static atomic_bool is_on, is_used, has_missed;
static uint64_t area_base = USUAL_BASE, area_size = USUAL_SIZE;	/* never changed once it is on */
static _Atomic(uint64_t) given;		/* in all; the next place is that modulo the area */

void mpsd_place_begin(void)
{
	area_base = mpsd_debug_number(MPSD_DEBUG_PLACE_BASE, USUAL_BASE, STEP, LOWEST, END_OF_ADDRESSES - CHOSEN_SIZE);
	area_size = area_base == USUAL_BASE ? USUAL_SIZE : CHOSEN_SIZE;
	atomic_store(&is_on, true);
}

bool mpsd_place_is_used(void)
{
	return atomic_load(&is_used);
}

bool mpsd_place_has_missed(void)
{
	return atomic_load(&has_missed);
}

bool mpsd_place_covers(uint64_t base, size_t size)
{
	return base < area_base + area_size && base + size > area_base;
}

/* NULL where it would reach beyond the end: the next one is at the beginning. */
static void *next_place(size_t length)
{
	uint64_t size = (length + STEP - 1) / STEP * STEP;
	uint64_t at = atomic_fetch_add(&given, size) % area_size;

	return size <= area_size - at ? (void *)(area_base + at) : NULL;
}

/* Further each time: what is in use may be large, and what wants a place small. */
static void leap(int tries)
{
	atomic_fetch_add(&given, STEP << tries);
}

static void *place(size_t length, int protection, int flags, int fd, off_t offset)
{
	atomic_store(&is_used, true);
	for (int i = 0; i < TRIES; i++) {
		void *next = next_place(length);
		void *at = next ? mmap(next, length, protection, flags, fd, offset) : NULL;

		if (next && (at == next || at == MAP_FAILED))
			return at;
		if (next)
			munmap(at, length);
		leap(i);
	}
	atomic_store(&has_missed, true);
	return mmap(NULL, length, protection, flags, fd, offset);
}

/* A hint that the kernel does not take is none: it would put the mapping anywhere. */
void *mpsd_place_mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset)
{
	void *at;

	if (flags & OWN_PLACE || length > area_size / 2 || !atomic_load(&is_on))
		return mmap(address, length, protection, flags, fd, offset);
	if (address) {
		at = mmap(address, length, protection, flags, fd, offset);
		if (at == address || at == MAP_FAILED)
			return at;
		munmap(at, length);
	}
	return place(length, protection, flags, fd, offset);
}
