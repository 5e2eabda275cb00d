/* SPDX-License-Identifier: MIT */
/*
 * Which of a process's host mappings a guard may cover. Pure: it reads the text of /proc/self/maps and calls nothing.
 *
 * Private memory of the program that its GPU has no business with unless it is registered: anonymous memory that
 * can be read or written, heap, stack, programs and libraries. Not devices, shared memory, memory files, data files
 * and deleted ones; nothing below 8 GiB, where the outer guard of the daemon lies and programs map at fixed places.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HOSTPLAN_GRANULE ((uint64_t)64 << 10)	/* of sparse ranges */
#define HOSTPLAN_PIECE ((uint64_t)256 << 20)	/* others wait for the address space while one is laid */

struct host_range {
	uint64_t base, size;
};

/*
 * Fills `ranges` with at most `most` of them, lowest first, of `bytes` in all at most; none touches an address for
 * which `is_off` is true, nor any of the `hole_count` holes. Returns how many there are.
 */
size_t mpsd_hostplan(const char *maps, bool (*is_off)(uint64_t base, size_t size), const struct host_range *holes,
		     size_t hole_count, uint64_t bytes, struct host_range *ranges, size_t most);
