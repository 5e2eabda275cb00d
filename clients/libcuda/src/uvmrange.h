/* SPDX-License-Identifier: MIT */
/*
 * Ranges of this process's GPU address space that absorb stray accesses, laid by this process itself:
 * managed ones, whose hits the driver reports to whoever tracks the address space, and sparse ones, whose
 * hits nobody hears of. None of the driver's functions is called. For one thread at a time.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Over a part of a reservation where nothing is mapped. False: it is as it was before. */
bool mpsd_range_manage(uint64_t base, size_t size);
bool mpsd_range_sparse(uint64_t base, size_t size, const uint8_t gpu[16]);

/* The first 64 KiB of all addresses, where this process may map them and nothing lies there. */
#define MPSD_RANGE_NULL_PAGE ((size_t)64 << 10)
bool mpsd_range_manage_null(void);

/*
 * Take away what was laid with these bounds; the reservation's own placeholder is there again. False: it
 * is still there, so the addresses are of no use.
 */
bool mpsd_range_free(uint64_t base, size_t size, bool managed);

/*
 * A second copy of the driver has descriptors too, of an address space of its own. Before it opens them; after
 * that; when it has gone; when it is the one in use.
 */
enum mpsd_range_copy {
	MPSD_RANGE_COPY_COMES,
	MPSD_RANGE_COPY_IS_THERE,
	MPSD_RANGE_COPY_WENT,
	MPSD_RANGE_COPY_TAKES_OVER,
};
void mpsd_range_copy(enum mpsd_range_copy what);

/* Whether what is taken away was laid for a copy that is used no more: nothing is asked of it. */
void mpsd_range_gone(bool gone);
