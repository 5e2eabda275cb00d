/* SPDX-License-Identifier: MIT */
/*
 * Stream-ordered allocations (cuMemAllocAsync) where a fail-over may come: served from the window, as cuMemAlloc's
 * are, by the default pools and by pools of device memory that the program makes.
 *
 *	cuMemFreeAsync  --> the block stays mapped and is kept, with its stream      (poolblocks.h)
 *	cuMemAllocAsync --> a kept block of that stream, or of another one that the GPU is past; else cuMemAlloc
 *
 * A kept block is not unmapped while work of its epoch may be replayed. Work is replayed in the order in which it was
 * submitted, so each operation finds in the block what it found the first time.
 */
#pragma once

#include <stdatomic.h>

#include "failover/carry.h"

enum mpsd_pool_reuse {
	MPSD_REUSE_BY_EVENTS,
	MPSD_REUSE_OPPORTUNISTIC,
	MPSD_REUSE_BY_OWN_EVENTS,
	MPSD_REUSES,
};

/* Under the lock of pools.c, but for what does not change. */
struct mpsd_pool {
	struct mpsd_pool *next;		/* of those that the program has made */
	CUmemoryPool name;		/* what the program calls it; NULL: it has not asked yet */
	CUdevice device;
	bool is_default, is_gone;
	uint64_t since;			/* `moves` before the driver instance that has it; each has the default pools */
	int reuse[MPSD_REUSES];
	uint64_t threshold;
	uint64_t used, used_high;	/* bytes asked for */
	uint64_t reserved, reserved_high;	/* bytes of blocks, */
	uint64_t kept;			/* and of free ones */
};

/* poolcalls.c: the pool that cuMemAllocAsync takes memory from; NULL: one that the driver serves alone. */
struct mpsd_pool *mpsd_pools_current(CUdevice device);

/* Likewise: that of the program's handle; and, with the lock, the device's default one. */
struct mpsd_pool *mpsd_pools_named(CUmemoryPool name);
struct mpsd_pool *mpsd_pools_default(CUdevice device);

/* Likewise: what the program calls that one, whether it has asked or not. NULL: the driver does not say. */
CUmemoryPool mpsd_pools_ask_default(CUdevice device);

/* Likewise: what the driver instance of this call calls it. NULL: it has no such pool. */
CUmemoryPool mpsd_pools_native(CUmemoryPool name);

/* The driver's pools do not move. So a call for the driver is noted before it is made. */
#define MPSD_POOLS_PASS(what, call) \
	(mpsd_line_made(CUDA_SUCCESS, what) == CUDA_SUCCESS && mpsd_relay_flush() ? (call) : MPSD_AGAIN)

/* pools.c, the others with the lock */
struct mpsd_poolblock;
void mpsd_pools_lock(void);
void mpsd_pools_unlock(void);
bool mpsd_pools_is_over(const struct mpsd_pool *pool);
void mpsd_pools_set_over(const struct mpsd_pool *pool);	/* if it is */
uint64_t mpsd_pools_frees(void);
void mpsd_pools_drop_fence(struct mpsd_poolblock *block);
void mpsd_pools_count_gone(struct mpsd_poolblock *block);	/* it is not its pool's any more */

/* poolrelease.c: free blocks go while so many bytes stay, if nothing is in flight. NULL: of pools over thresholds. */
void mpsd_pools_trim(struct mpsd_pool *pool, uint64_t keep);

/* A pool has ended: its free blocks are the default pool's. */
void mpsd_pools_inherit(struct mpsd_pool *pool);

/* Whether a pool holds more than its release threshold, and something of that is free. */
extern atomic_bool mpsd_pools_over;
void mpsd_pools_release_over(void);

/* After a wait of the program's for work, outside a call: what is over a threshold goes if nothing is in flight. */
static inline void mpsd_pools_waited(void)
{
	if (__builtin_expect(atomic_load_explicit(&mpsd_pools_over, memory_order_relaxed), 0))
		mpsd_pools_release_over();
}

/* Whether there are free blocks that may go; if memory is short, mpsd_exact_without_work() calls the other one. */
bool mpsd_pools_have_free(void);
CUresult mpsd_pools_give_back(const void *unused);

/* cuMemFree of a block: the program says that no work uses it any more. False: there is no such block. */
bool mpsd_pools_free(CUdeviceptr address, CUresult *result);

/* What a pointer into a block answers. False: no block begins at that address of an allocation. */
struct mpsd_pool_answer {
	CUmemoryPool pool;
	size_t size;		/* asked for */
	bool is_free;
};
bool mpsd_pools_look(CUdeviceptr base, struct mpsd_pool_answer *answer);

/* The memory there ends with its context. The lock of the windows may be held. */
void mpsd_pools_forget(CUdeviceptr address);

/* The stream is about to end, in the driver instance of this call. */
void mpsd_pools_without(CUstream name, CUstream native);

void mpsd_pools_child(void);
