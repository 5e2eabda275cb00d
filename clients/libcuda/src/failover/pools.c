// SPDX-License-Identifier: MIT
#include "failover/pools.h"

#include <pthread.h>
#include <stdlib.h>

#include "capture.h"
#include "exact/exact.h"
#include "exact/order.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "failover/poolfences.h"
#include "marks.h"
#include "memory.h"
#include "physical.h"
#include "poolblocks.h"

/* A key below this one is the legacy stream of a device; the others are handles. */
#define KEYS_OF_LEGACY (1 + MPSD_DEVICES)

#define MOST_FENCES 4			/* that one allocation asks for */

atomic_bool mpsd_pools_over;

/* Taken with, and without, the lock of the windows; nothing is called of the driver's while it is held. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t frees;			/* so far */

void mpsd_pools_lock(void)
{
	pthread_mutex_lock(&lock);
}

void mpsd_pools_unlock(void)
{
	pthread_mutex_unlock(&lock);
}

uint64_t mpsd_pools_frees(void)
{
	return frees;
}

bool mpsd_pools_is_over(const struct mpsd_pool *pool)
{
	return pool->kept && pool->reserved > pool->threshold;
}

/* Where the allocation, or the free, is ordered. */
struct place {
	CUcontext context;
	CUdevice device;
	uint64_t key;
	bool is_primary;	/* whether the context is one; else the rest is not known */
	bool is_current;
};

static CUresult find_place(CUstream stream, struct place *place)
{
	bool is_legacy = !stream || stream == CU_STREAM_LEGACY;
	CUcontext current;
	CUresult result = real_cuCtxGetCurrent(&current);

	place->context = current;
	if (result == CUDA_SUCCESS && !is_legacy)
		result = real_cuStreamGetCtx(mpsd_native(stream), &place->context);
	if (result != CUDA_SUCCESS)
		return result;
	if (!place->context)
		return CUDA_ERROR_INVALID_CONTEXT;
	place->is_primary = stream != CU_STREAM_PER_THREAD && mpsd_memory_is_primary(place->context, &place->device);
	place->is_current = place->context == current;
	if (place->is_primary)
		place->key = is_legacy ? 1 + (uint64_t)place->device : (uint64_t)(uintptr_t)stream;
	return CUDA_SUCCESS;
}

/* Blocks, with the lock */

/* What comes next in this driver instance comes after all that was replayed, and after the fence of the last one. */
static bool is_unused(const struct mpsd_poolblock *block)
{
	return block->is_idle || block->moves < mpsd_tables()->moves || (block->fence && block->fence->is_reached);
}

struct wanted {
	uint64_t key;
	uint64_t unfenced;		/* the stream of a block that would do, if it has ended there; 0: none */
	uint64_t until;			/* so many frees were there */
	unsigned int count;
	struct mpsd_pool_fence *fences[MOST_FENCES];
};

static void note_fence(struct wanted *wanted, struct mpsd_pool_fence *fence)
{
	for (unsigned int i = 0; i < wanted->count; i++)
		if (wanted->fences[i] == fence)
			return;
	if (wanted->count < MOST_FENCES)
		wanted->fences[wanted->count++] = mpsd_poolfence_share(fence);
}

static bool may_take(struct mpsd_poolblock *block, void *with)
{
	struct wanted *wanted = with;

	if ((block->stream && block->stream == wanted->key) || is_unused(block))
		return true;
	if (block->fence)
		note_fence(wanted, block->fence);
	else
		wanted->unfenced = block->stream;
	return false;
}

void mpsd_pools_set_over(const struct mpsd_pool *pool)
{
	if (mpsd_pools_is_over(pool))
		atomic_store_explicit(&mpsd_pools_over, true, memory_order_relaxed);
}

void mpsd_pools_drop_fence(struct mpsd_poolblock *block)
{
	if (block->fence)
		mpsd_poolfence_leave(block->fence);
	block->fence = NULL;
}

static void use(struct mpsd_pool *pool, size_t size)
{
	pool->used += size;
	if (pool->used > pool->used_high)
		pool->used_high = pool->used;
}

void mpsd_pools_count_gone(struct mpsd_poolblock *block)
{
	block->pool->reserved -= block->capacity;
	if (block->is_free)
		block->pool->kept -= block->capacity;
	else
		block->pool->used -= block->size;
}

/* Its memory has ended with its context, and the event of its fence too. */
static void drop_ended(CUdeviceptr address)
{
	struct mpsd_poolblock *block = mpsd_poolblocks_find(address);

	if (!block)
		return;
	mpsd_poolblocks_remove(block);
	mpsd_pools_count_gone(block);
	if (block->fence)
		mpsd_poolfence_lose(block->fence);
	mpsd_pools_drop_fence(block);
	free(block);
}

static CUdeviceptr take_free(struct mpsd_pool *pool, size_t size, struct wanted *wanted)
{
	struct mpsd_poolblock *block;
	CUdeviceptr address = 0;

	pthread_mutex_lock(&lock);
	wanted->until = frees;
	block = mpsd_poolblocks_fit(pool, size, may_take, wanted);
	if (block) {
		mpsd_poolblocks_take(block);
		mpsd_pools_drop_fence(block);
		block->size = size;
		pool->kept -= block->capacity;
		use(pool, size);
		address = block->address;
	}
	pthread_mutex_unlock(&lock);
	return address;
}

struct fencing {
	uint64_t key, until;
	struct mpsd_pool_fence *fence;
};

static bool put_behind(struct mpsd_poolblock *block, void *with)
{
	struct fencing *fencing = with;

	if (block->stream == fencing->key && !block->fence && block->order <= fencing->until)
		block->fence = mpsd_poolfence_share(fencing->fence);
	return true;
}

static void put_all_behind(struct fencing fencing)
{
	pthread_mutex_lock(&lock);
	mpsd_poolblocks_each(put_behind, &fencing);
	pthread_mutex_unlock(&lock);
}

/* Of a stream in this call's context. */
static struct mpsd_pool_fence *new_fence(uint64_t key)
{
	CUdevice device;

	if (key >= KEYS_OF_LEGACY)
		return mpsd_poolfence_new((CUstream)(uintptr_t)key);
	if (real_cuCtxGetDevice(&device) != CUDA_SUCCESS || (uint64_t)device + 1 != key)
		return NULL;
	return mpsd_poolfence_new(CU_STREAM_LEGACY);
}

/* Blocks of other streams that would do: whether the GPU is past the free of one. */
static bool look(struct wanted *wanted)
{
	struct fencing fencing = { wanted->unfenced, wanted->until, NULL };
	bool is = false;

	for (unsigned int i = 0; i < wanted->count; i++)
		is |= mpsd_poolfence_look(wanted->fences[i]);
	if (is || !fencing.key)
		return is;
	fencing.fence = new_fence(fencing.key);
	if (!fencing.fence)
		return false;
	put_all_behind(fencing);
	is = mpsd_poolfence_look(fencing.fence);
	pthread_mutex_lock(&lock);
	mpsd_poolfence_leave(fencing.fence);
	pthread_mutex_unlock(&lock);
	return is;
}

/* 0: there is none. */
static CUdeviceptr find_free(struct mpsd_pool *pool, size_t size, const struct place *place)
{
	struct wanted wanted = { .key = place->key }, again = { .key = place->key };
	CUdeviceptr address = take_free(pool, size, &wanted);
	bool may_look = pool->reuse[MPSD_REUSE_OPPORTUNISTIC] && place->is_current && !mpsd_capture_active();

	if (!wanted.count && (address || !wanted.unfenced))
		return address;
	if (!address && may_look && look(&wanted))
		address = take_free(pool, size, &again);
	pthread_mutex_lock(&lock);
	for (unsigned int i = 0; i < wanted.count; i++)
		mpsd_poolfence_leave(wanted.fences[i]);
	for (unsigned int i = 0; i < again.count; i++)
		mpsd_poolfence_leave(again.fences[i]);
	pthread_mutex_unlock(&lock);
	mpsd_poolfences_sweep();
	return address;
}

/* Allocations */

CUresult make_cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize);
CUresult make_cuMemFree_v2(CUdeviceptr dptr);

/* cuMemAllocAsync is allowed beside any capture, and the calls that it is made of are not. */
static CUresult alloc_beside_captures(CUdeviceptr *address, size_t size)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	CUresult result;

	if (!mpsd_capture_active())
		return make_cuMemAlloc_v2(address, size);
	result = real_cuThreadExchangeStreamCaptureMode(&mode);
	if (result != CUDA_SUCCESS)
		return result;
	result = make_cuMemAlloc_v2(address, size);
	real_cuThreadExchangeStreamCaptureMode(&mode);
	return result;
}

static CUresult alloc_in(const struct place *place, CUdeviceptr *address, size_t size)
{
	CUresult result = place->is_current ? CUDA_SUCCESS : real_cuCtxPushCurrent_v2(place->context);

	if (result != CUDA_SUCCESS)
		return result;
	result = alloc_beside_captures(address, size);
	if (!place->is_current)
		real_cuCtxPopCurrent_v2(&(CUcontext){ NULL });
	return result;
}

static CUresult alloc_new(struct mpsd_pool *pool, const struct place *place, CUdeviceptr *address, size_t size)
{
	size_t capacity = mpsd_poolblocks_capacity(size);
	CUresult result = capacity ? alloc_in(place, address, capacity) : CUDA_ERROR_OUT_OF_MEMORY;
	struct mpsd_poolblock *block;

	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&lock);
	/* Memory outside the window ends without a call of mpsd_pools_forget(). */
	drop_ended(*address);
	block = mpsd_poolblocks_add(pool, *address, capacity, size);
	if (block) {
		use(pool, size);
		pool->reserved += capacity;
		if (pool->reserved > pool->reserved_high)
			pool->reserved_high = pool->reserved;
	}
	pthread_mutex_unlock(&lock);
	if (block)
		return CUDA_SUCCESS;
	make_cuMemFree_v2(*address);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult alloc(struct mpsd_pool *pool, const struct place *place, CUdeviceptr *dptr, size_t size)
{
	CUdeviceptr address = find_free(pool, size, place);
	CUresult result = address ? CUDA_SUCCESS : alloc_new(pool, place, &address, size);

	if (result == CUDA_SUCCESS)
		*dptr = address;
	return result;
}

/* A program that cannot move anyway has the driver's pools, with all that belongs to them. */
static bool is_served(const struct mpsd_pool *pool)
{
	return pool && (!atomic_load(&mpsd_opaque_notes()->count) ||
			(!pool->is_default && pool->since != mpsd_tables()->moves));
}

#define ASYNC "cuMemAllocAsync"
#define IN_CAPTURE "cuMemAllocAsync in a capture"
#define FROM_POOL "cuMemAllocFromPoolAsync"

CUresult make_cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
	struct place place = { 0 };
	struct mpsd_pool *pool = NULL;
	CUresult result;

	/* What is wrong with the arguments is for the driver to say. */
	if (!dptr || !bytesize)
		return inner_cuMemAllocAsync(dptr, bytesize, mpsd_native(hStream));
	if (mpsd_is_captured(hStream))
		return MPSD_POOLS_PASS(IN_CAPTURE, inner_cuMemAllocAsync(dptr, bytesize, mpsd_native(hStream)));
	result = find_place(hStream, &place);
	if (result != CUDA_SUCCESS)
		return result;
	/* Once: another thread may choose another pool. */
	if (place.is_primary)
		pool = mpsd_pools_current(place.device);
	if (!is_served(pool))
		return MPSD_POOLS_PASS(ASYNC, inner_cuMemAllocAsync(dptr, bytesize, mpsd_native(hStream)));
	return alloc(pool, &place, dptr, bytesize);
}

CUresult make_cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream)
{
	struct mpsd_pool *from = mpsd_pools_named(pool);
	CUmemoryPool native = mpsd_pools_native(pool);
	struct place place = { 0 };
	CUresult result;

	if (pool && !native && !from)
		return MPSD_POOLS_PASS(FROM_POOL, CUDA_ERROR_NOT_SUPPORTED);
	if (!dptr || !bytesize || !pool)
		return native || !pool ? inner_cuMemAllocFromPoolAsync(dptr, bytesize, native, mpsd_native(hStream))
				       : CUDA_ERROR_INVALID_VALUE;
	if (!mpsd_is_captured(hStream) && is_served(from)) {
		result = find_place(hStream, &place);
		if (result != CUDA_SUCCESS)
			return result;
		if (place.is_primary && place.device == from->device)
			return alloc(from, &place, dptr, bytesize);
	}
	if (!native)
		return MPSD_POOLS_PASS(FROM_POOL, CUDA_ERROR_NOT_SUPPORTED);
	return MPSD_POOLS_PASS(FROM_POOL, inner_cuMemAllocFromPoolAsync(dptr, bytesize, native, mpsd_native(hStream)));
}

/* Frees */

/* False: no block begins there. `is_idle`: no work uses it any more. */
static bool keep(CUdeviceptr address, uint64_t key, bool is_idle, CUresult *result)
{
	struct mpsd_poolblock *block;
	bool is_used;

	pthread_mutex_lock(&lock);
	block = mpsd_poolblocks_find(address);
	is_used = block && !block->is_free;
	if (is_used) {
		block->pool->used -= block->size;
		if (block->pool->is_gone) {
			block->pool->reserved -= block->capacity;
			block->pool = mpsd_pools_default(block->pool->device);
			block->pool->reserved += block->capacity;
		}
		block->stream = key;
		block->is_idle = is_idle;
		block->order = ++frees;
		block->moves = mpsd_tables()->moves;
		block->pool->kept += block->capacity;
		mpsd_poolblocks_keep(block);
		mpsd_pools_set_over(block->pool);
	}
	pthread_mutex_unlock(&lock);
	if (is_used)
		mpsd_mark_forget(address);
	*result = is_used ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	return block != NULL;
}

static bool is_block(CUdeviceptr address)
{
	bool is;

	pthread_mutex_lock(&lock);
	is = mpsd_poolblocks_find(address) != NULL;
	pthread_mutex_unlock(&lock);
	return is;
}

bool mpsd_pools_free(CUdeviceptr address, CUresult *result)
{
	CUresult said = CUDA_SUCCESS;

	if (!is_block(address))
		return false;
	if (mpsd_capture_active())
		said = mpsd_capture_probe();
	if (said == CUDA_SUCCESS)
		return keep(address, 0, true, result);
	*result = said;
	return true;
}

CUresult make_cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream)
{
	struct place place = { 0 };
	CUresult result;

	if (mpsd_is_captured(hStream))
		return MPSD_POOLS_PASS("cuMemFreeAsync in a capture", inner_cuMemFreeAsync(dptr, mpsd_native(hStream)));
	if (is_block(dptr)) {
		result = find_place(hStream, &place);
		/* What was freed in the order of another context than a primary one waits for a release. */
		if (result != CUDA_SUCCESS || keep(dptr, place.key, false, &result))
			return result;
	}
	/* Memory of cuMemAlloc is freed after a wait. */
	if (mpsd_memory_is_in_window(dptr))
		return make_cuMemFree_v2(dptr);
	return mpsd_relay_flush() ? inner_cuMemFreeAsync(dptr, mpsd_native(hStream)) : MPSD_AGAIN;
}

/* What others tell, and ask */

static bool inherit(struct mpsd_poolblock *block, void *with)
{
	struct mpsd_pool *heir = mpsd_pools_default(block->pool->device);

	if (block->pool != with)
		return true;
	mpsd_pools_count_gone(block);
	block->pool = heir;
	heir->reserved += block->capacity;
	heir->kept += block->capacity;
	mpsd_pools_set_over(heir);
	return true;
}

void mpsd_pools_inherit(struct mpsd_pool *pool)
{
	pthread_mutex_lock(&lock);
	pool->is_gone = true;
	mpsd_poolblocks_each(inherit, pool);
	pthread_mutex_unlock(&lock);
}

bool mpsd_pools_look(CUdeviceptr base, struct mpsd_pool_answer *answer)
{
	struct mpsd_poolblock *block;
	CUdevice device = 0;

	pthread_mutex_lock(&lock);
	block = mpsd_poolblocks_find(base);
	if (block) {
		*answer = (struct mpsd_pool_answer){ block->pool->name, block->size, block->is_free };
		device = block->pool->device;
	}
	pthread_mutex_unlock(&lock);
	if (block && !answer->pool)
		answer->pool = mpsd_pools_ask_default(device);
	return block;
}

void mpsd_pools_forget(CUdeviceptr address)
{
	pthread_mutex_lock(&lock);
	drop_ended(address);
	pthread_mutex_unlock(&lock);
}

struct leaving {
	uint64_t key;
	unsigned int count;
};

static bool count_unfenced(struct mpsd_poolblock *block, void *with)
{
	struct leaving *leaving = with;

	leaving->count += block->stream == leaving->key && !block->fence && !is_unused(block);
	return true;
}

/* Its handle may be another stream's next. */
static bool without_stream(struct mpsd_poolblock *block, void *with)
{
	if (block->stream == ((const struct leaving *)with)->key)
		block->stream = 0;
	return true;
}

void mpsd_pools_without(CUstream name, CUstream native)
{
	struct leaving leaving = { (uint64_t)(uintptr_t)name, 0 };
	struct fencing fencing = { leaving.key, UINT64_MAX, NULL };

	if (leaving.key < KEYS_OF_LEGACY)
		return;
	pthread_mutex_lock(&lock);
	mpsd_poolblocks_each(count_unfenced, &leaving);
	pthread_mutex_unlock(&lock);
	/* Without a fence nothing uses them before memory is short. */
	if (leaving.count && !mpsd_capture_active())
		fencing.fence = mpsd_poolfence_of(native);
	if (fencing.fence)
		put_all_behind(fencing);
	pthread_mutex_lock(&lock);
	mpsd_poolblocks_each(without_stream, &leaving);
	if (fencing.fence)
		mpsd_poolfence_leave(fencing.fence);
	pthread_mutex_unlock(&lock);
	mpsd_poolfences_sweep();
}

void mpsd_pools_child(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
