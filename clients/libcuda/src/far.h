/* SPDX-License-Identifier: MIT */
/*
 * Far zones: managed ranges below the first piece of each window and behind its last one, for an index that
 * overflowed. They lie over addresses that nobody has, in chunks, so that they give way to pieces, to
 * quarantine and to the window's growth one by one. All under the lock of zones.c.
 */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How many bytes of them, and zones, there may be now. */
struct mpsd_far_share {
	uint64_t bytes, zones;
};

/* A window was opened, whose first `lead` bytes nobody gets; `size` is to lie on each side of its pieces. */
void mpsd_far_window(CUdevice device, uint64_t base, size_t lead, size_t whole, size_t size);

/*
 * Nobody has the addresses of that window from `tail` on; what lies before is taken away. False: that could not
 * be done, so nothing may be mapped there.
 */
bool mpsd_far_tail(CUdevice device, uint64_t tail);

/* No more than the share; then the nearest one that is missing. False: none is, or it cannot be laid. */
bool mpsd_far_step(struct mpsd_far_share share);

/* The furthest one of all. False: there is none. */
bool mpsd_far_drop(void);

/* Nothing has memory in that window any more; until the next tail. */
void mpsd_far_close(CUdevice device);

/* All of them, until the next step. */
void mpsd_far_drop_all(void);
