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
 * else meanwhile is left for later.
 */
bool mpsd_fence(void);

/*
 * Behind the fence. What only copies of mode `exact` come into, the room of what was there before, it left to a thread,
 * but for what was being copied into: nothing is saved there anew before that has seen to it. Here that is waited for,
 * before the next move at the latest; where the old copy may still write there it is given up.
 */
void mpsd_fence_finish(void);
bool mpsd_fence_is_unfinished(void);

/* Whether copies may be made there. */
bool mpsd_fence_has_room(void);

/* Until it is. AGAIN: a move has begun meanwhile; OUT_OF_MEMORY: it is not to be had for 2 s. */
CUresult mpsd_fence_await_room(void);

/* The program ends: mpsd_fence_finish() waits for nothing any more. */
void mpsd_fence_leave_off(void);

/* Whether something is being unmapped beside the program. */
bool mpsd_fence_lasts(void);

/* Until that has ended, or so long. Whether there was such a thing, and it has. */
bool mpsd_fence_await(int milliseconds);

/* The same where the program ends, which it is told more than once: 2 s in all. */
void mpsd_fence_at_end(void);

/* In a forked child, where nobody unmaps anything. */
void mpsd_fence_child(void);
