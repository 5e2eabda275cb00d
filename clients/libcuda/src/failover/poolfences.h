/* SPDX-License-Identifier: MIT */
/* How far a stream was when memory was freed in it: another stream may use that memory once the GPU has come past. */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

struct mpsd_proof;

struct mpsd_pool_fence {
	struct mpsd_pool_fence *next;	/* among those that are swept */
	unsigned int shares;		/* these two with the lock of pools.c */
	bool is_reached;
	uint64_t moves;			/* before the driver instance that it is in */
	struct mpsd_proof *proof;	/* in mode `exact`: the stream's word says so, */
	CUevent event;			/* elsewhere an event */
};

/*
 * Behind all that was submitted to the stream so far, by the program's name for it; or in any mode by an event, for a
 * stream of this call's driver instance that is about to end. One share is the caller's. NULL: it cannot be known now.
 */
struct mpsd_pool_fence *mpsd_poolfence_new(CUstream stream);
struct mpsd_pool_fence *mpsd_poolfence_of(CUstream native);

/* Without the lock: whether the GPU has come past. */
bool mpsd_poolfence_look(struct mpsd_pool_fence *fence);

/* With the lock. What nobody shares any more ends by sweep(), without it. */
struct mpsd_pool_fence *mpsd_poolfence_share(struct mpsd_pool_fence *fence);
void mpsd_poolfence_leave(struct mpsd_pool_fence *fence);
void mpsd_poolfence_lose(struct mpsd_pool_fence *fence);	/* its context has ended */
void mpsd_poolfences_sweep(void);
