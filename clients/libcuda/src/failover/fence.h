/* SPDX-License-Identifier: MIT */
/*
 * The end of what the copy in use may write into the windows: it has nothing in flight, by the GPU's own word; or its way
 * there is cut off (cut.h); or the daemon knows that the driver has ended all work of that domain (FENCED); or, where
 * none of that is to be had, all of their memory is unmapped there. In a context that was lost that may last half a second,
 * and goes on beside the program otherwise, in the copy that was left.
 */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

/* Where the daemon would say FENCED in the next move, and of which generation. -1: nowhere. */
void mpsd_fence_listen(int line, uint64_t generation);

/* Behind a move: whether the daemon says it now, of that; only that is taken from the line. Or it was taken already. */
bool mpsd_fence_hears(void);
void mpsd_fence_told(uint64_t generation);

/*
 * In a move, with the lock of the windows. False: the old copy may still write, to some of it. What the daemon says
 * else meanwhile is left for later. `may_go_ahead`: it may be begun, and not wait for its end: then it is ahead, and what
 * is given to the next copy must not come to the GPU before that.
 */
bool mpsd_fence(bool may_go_ahead);

/* Where it is ahead, by the mover: that word of the host's becomes MPSD_GATE_IS_OPEN when it has come to its end. */
#define MPSD_GATE_IS_OPEN 1
bool mpsd_fence_is_ahead(void);
void mpsd_fence_opens(uint32_t *gate);

#define MPSD_STILL_WRITES "the old context may still write"

/*
 * Until then. False, from then on: the old copy may still write, so nothing that the program waits for is right any more,
 * which each of its waits says. Where it is not ahead there is nothing to be waited for.
 */
bool mpsd_fence_complete(void);

/* When the last one was known to hold: CLOCK_MONOTONIC. */
uint64_t mpsd_fence_ended_ns(void);

/*
 * Behind the fence, when it is complete. What only copies of mode `exact` come into, the room of what was there before, it
 * left to a thread, but for what was being copied into: nothing is saved there anew before that has seen to it. Here that
 * is waited for, before the next move at the latest; where the old copy may still write there it is given up.
 */
void mpsd_fence_finish(void);
bool mpsd_fence_is_unfinished(void);

/* The program ends: that waits for nothing any more; and the unmapping is waited for, 2 s however often this is called. */
void mpsd_fence_leave_off(void);
void mpsd_fence_at_end(void);

/* In a forked child, where nobody unmaps anything. */
void mpsd_fence_child(void);
