/* SPDX-License-Identifier: MIT */
/*
 * Where the driver's own mappings lie, while the program's are under guard (hostguard.h): in an area of their own.
 * Elsewhere the kernel would put the next one just where a guarded mapping has gone, and the driver would
 * not get the addresses on the GPU.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* From now on. Before the driver maps anything that the GPU sees. */
void mpsd_place_begin(void);

/* Called in mmap's place by copies of the driver: what has no address of its own gets one in the area. */
void *mpsd_place_mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset);

/* Whether some of it lies in the area. Takes no lock. */
bool mpsd_place_covers(uint64_t base, size_t size);

/* Whether a mapping of the driver's was led here yet: where none is, the driver maps by ways of its own. */
bool mpsd_place_is_used(void);

/* Something had to be put elsewhere: nothing can be promised of it. */
bool mpsd_place_has_missed(void);
