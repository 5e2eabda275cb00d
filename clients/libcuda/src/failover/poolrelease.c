// SPDX-License-Identifier: MIT
/* Free blocks that go: over a threshold, by the program's trim, or because memory is short. */
#include <stdlib.h>

#include "capture.h"
#include "exact/exact.h"
#include "failover/poolfences.h"
#include "failover/pools.h"
#include "poolblocks.h"

struct release {
	struct mpsd_pool *pool;		/* NULL: each that is over its threshold, or all of them */
	bool is_all;
	uint64_t keep, until;
	unsigned int freed;
	struct mpsd_poolblock *block;
};

static uint64_t to_keep(const struct release *release, const struct mpsd_pool *pool)
{
	return release->is_all ? 0 : release->pool ? release->keep : pool->threshold;
}

/* So much stays without it. A threshold may be the largest number. */
static bool may_go(const struct mpsd_poolblock *block, uint64_t bytes)
{
	return block->pool->reserved >= block->capacity && block->pool->reserved - block->capacity >= bytes;
}

static bool find_one(struct mpsd_poolblock *block, void *with)
{
	struct release *release = with;
	struct mpsd_pool *pool = block->pool;

	if ((release->pool && release->pool != pool) || block->order > release->until ||
	    !may_go(block, to_keep(release, pool)))
		return true;
	release->block = block;
	return false;
}

static void put_back(struct mpsd_poolblock *block)
{
	if (block->pool->is_gone)
		block->pool = mpsd_pools_default(block->pool->device);
	block->pool->reserved += block->capacity;
	block->pool->kept += block->capacity;
	mpsd_poolblocks_put_back(block);
	mpsd_pools_set_over(block->pool);
}

/* It is nobody's meanwhile. */
static bool take_out(struct release *release)
{
	release->block = NULL;
	mpsd_pools_lock();
	mpsd_poolblocks_each(find_one, release);
	if (release->block) {
		mpsd_poolblocks_remove(release->block);
		mpsd_pools_count_gone(release->block);
	}
	mpsd_pools_unlock();
	return release->block;
}

static CUresult release_blocks(const void *with)
{
	struct release *release = *(struct release *const *)with;
	CUresult result = CUDA_SUCCESS;

	while (result == CUDA_SUCCESS && take_out(release)) {
		result = inner_cuMemFree_v2(release->block->address);
		mpsd_pools_lock();
		if (result == CUDA_SUCCESS)
			mpsd_pools_drop_fence(release->block);
		else
			put_back(release->block);
		mpsd_pools_unlock();
		if (result != CUDA_SUCCESS)
			break;
		free(release->block);
		release->freed++;
	}
	mpsd_poolfences_sweep();
	return result;
}

static struct release new_release(struct mpsd_pool *pool, bool is_all, uint64_t bytes)
{
	struct release release = { .pool = pool, .is_all = is_all, .keep = bytes };

	mpsd_pools_lock();
	release.until = mpsd_pools_frees();
	mpsd_pools_unlock();
	return release;
}

bool mpsd_pools_have_free(void)
{
	struct release release = new_release(NULL, true, 0);

	/* What is freed during a capture stays: nothing may be waited for. */
	if (mpsd_capture_active())
		return false;
	mpsd_pools_lock();
	mpsd_poolblocks_each(find_one, &release);
	mpsd_pools_unlock();
	return release.block;
}

CUresult mpsd_pools_give_back(const void *unused)
{
	struct release release = new_release(NULL, true, 0), *with = &release;
	CUresult result = release_blocks(&with);

	(void)unused;
	if (result != CUDA_SUCCESS && (result == MPSD_AGAIN || mpsd_is_loss(result)))
		return result;
	return release.freed ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void mpsd_pools_trim(struct mpsd_pool *pool, uint64_t bytes)
{
	struct release release = new_release(pool, false, bytes), *with = &release;

	if (!mpsd_capture_active())
		mpsd_exact_at_rest(release_blocks, &with);
}

static bool find_over(struct mpsd_poolblock *block, void *with)
{
	*(bool *)with |= may_go(block, block->pool->threshold);
	return !*(bool *)with;
}

void mpsd_pools_release_over(void)
{
	uint64_t moves = mpsd_carry_enter();
	bool is = false;

	mpsd_pools_trim(NULL, 0);
	mpsd_pools_lock();
	mpsd_poolblocks_each(find_over, &is);
	atomic_store_explicit(&mpsd_pools_over, is, memory_order_relaxed);
	mpsd_pools_unlock();
	mpsd_carry_leave(moves);
}
