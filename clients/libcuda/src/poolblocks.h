/* SPDX-License-Identifier: MIT */
/*
 * Memory of stream-ordered allocations (failover/pools.h): the blocks in use, and free ones that are kept for later.
 * Pure bookkeeping: it calls nothing of CUDA's and has no lock.
 *
 * A block is one allocation of cuMemAlloc. It is never split, so that addresses, guard zones and snapshots stay those
 * of an allocation. A request takes a free block that is at most an eighth larger.
 */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct mpsd_pool;
struct mpsd_pool_fence;

struct mpsd_poolblock {
	struct mpsd_poolblock *next;		/* in its bucket */
	struct mpsd_poolblock *newer, *older;	/* in its bin, if it is free */
	struct mpsd_pool *pool;
	CUdeviceptr address;
	size_t capacity, size;		/* of the memory; asked for */
	bool is_free;
	/* Of a free one: */
	bool is_idle;			/* no work uses it any more, by the program's word */
	uint64_t stream;		/* in whose order it was freed (pools.c); 0: of no stream that is left */
	uint64_t order;			/* counts all frees, from 1 */
	uint64_t moves;			/* before the driver instance of that call */
	struct mpsd_pool_fence *fence;	/* behind the work before it was freed; NULL: none yet */
};

/* What is asked of cuMemAlloc for so many bytes. 0: no size that memory has. */
size_t mpsd_poolblocks_capacity(size_t size);

/* A new block in use. NULL: out of host memory. */
struct mpsd_poolblock *mpsd_poolblocks_add(struct mpsd_pool *pool, CUdeviceptr address, size_t capacity, size_t size);

/* The block that begins there. NULL: there is none. */
struct mpsd_poolblock *mpsd_poolblocks_find(CUdeviceptr address);

/* Not among the blocks any more; the caller frees it, or puts it back. */
void mpsd_poolblocks_remove(struct mpsd_poolblock *block);
void mpsd_poolblocks_put_back(struct mpsd_poolblock *block);

/* A block in use becomes free; a free one is in use from now on. */
void mpsd_poolblocks_keep(struct mpsd_poolblock *block);
void mpsd_poolblocks_take(struct mpsd_poolblock *block);

/* The free block of that pool that fits best, and newest, among those that `may` be taken. NULL: there is none. */
struct mpsd_poolblock *mpsd_poolblocks_fit(const struct mpsd_pool *pool, size_t size,
					   bool (*may)(struct mpsd_poolblock *block, void *with), void *with);

/* All free ones, until `call` returns false; it may take or remove the one that it is given. */
void mpsd_poolblocks_each(bool (*call)(struct mpsd_poolblock *block, void *with), void *with);
