// SPDX-License-Identifier: MIT
/*
 * Stream-ordered allocations and memory pools, as objects with attributes. An allocation is there at once, and a free
 * waits for all work: no pool keeps memory.
 */
#include <stdlib.h>

#include "standin.h"

#define REUSES 3

struct CUmemPoolHandle_st {
	struct CUmemPoolHandle_st *next;
	CUdevice device;
	bool is_default, destroyed;
	int reuse[REUSES];
	cuuint64_t threshold, used, used_high;
};

static struct CUmemPoolHandle_st defaults[MOST_DEVICES] = {
	[0 ... MOST_DEVICES - 1] = { .is_default = true, .reuse = { 1, 1, 1 } },
};
static CUmemoryPool pools;		/* the others */
static CUmemoryPool current[MOST_DEVICES];	/* NULL: the default one */

static CUmemoryPool new_pool(CUdevice device)
{
	CUmemoryPool pool = calloc(1, sizeof(*pool));

	if (!pool)
		return NULL;
	*pool = (struct CUmemPoolHandle_st){ .next = pools, .device = device, .reuse = { 1, 1, 1 } };
	pools = pool;
	return pool;
}

static CUmemoryPool default_of(CUdevice device)
{
	defaults[device].device = device;
	return &defaults[device];
}

void close_pools(void)
{
	CUmemoryPool pool;

	while ((pool = pools)) {
		pools = pool->next;
		free(pool);
	}
}

static bool is_pool(const struct CUmemPoolHandle_st *handle)
{
	CUmemoryPool pool = pools;

	if (handle >= defaults && handle < defaults + MOST_DEVICES)
		return true;
	while (pool && pool != handle)
		pool = pool->next;
	return pool && !pool->destroyed;
}

void pool_took(CUmemoryPool pool, size_t size)
{
	pool->used += size;
	if (pool->used > pool->used_high)
		pool->used_high = pool->used;
}

void pool_got(CUmemoryPool pool, size_t size)
{
	pool->used -= size;
}

/* With the lock if the device is one. */
static CUresult enter_device(CUdevice device, const void *answer)
{
	CUresult result = is_initialised();

	if (result != CUDA_SUCCESS)
		return result;
	if (!is_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	if (!answer)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&gpu_lock);
	return CUDA_SUCCESS;
}

static CUresult enter_pool(CUmemoryPool pool)
{
	CUresult result = is_initialised();

	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&gpu_lock);
	return is_pool(pool) ? CUDA_SUCCESS : leave(CUDA_ERROR_INVALID_VALUE);
}

API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev)
{
	CUresult result = enter_device(dev, pool_out);

	if (result != CUDA_SUCCESS)
		return result;
	*pool_out = default_of(dev);
	return leave(CUDA_SUCCESS);
}

API CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)
{
	CUresult result = enter_device(dev, pool);

	if (result != CUDA_SUCCESS)
		return result;
	*pool = current[dev] ? current[dev] : default_of(dev);
	return leave(CUDA_SUCCESS);
}

API CUresult cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool)
{
	CUresult result = enter_pool(pool);

	if (result != CUDA_SUCCESS)
		return result;
	if (!is_device(dev) || pool->device != dev)
		return leave(CUDA_ERROR_INVALID_VALUE);
	current[dev] = pool;
	return leave(CUDA_SUCCESS);
}

API CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)
{
	CUresult result = is_initialised();

	if (result != CUDA_SUCCESS)
		return result;
	if (!pool || !poolProps || poolProps->allocType != CU_MEM_ALLOCATION_TYPE_PINNED ||
	    poolProps->location.type != CU_MEM_LOCATION_TYPE_DEVICE || !is_device(poolProps->location.id))
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&gpu_lock);
	*pool = new_pool(poolProps->location.id);
	return leave(*pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

/* The object stays for what was allocated from it. */
API CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
	CUresult result = enter_pool(pool);

	if (result != CUDA_SUCCESS)
		return result;
	if (pool->is_default)
		return leave(CUDA_ERROR_INVALID_VALUE);
	pool->destroyed = true;
	if (current[pool->device] == pool)
		current[pool->device] = NULL;
	return leave(CUDA_SUCCESS);
}

static CUresult set(CUmemoryPool pool, CUmemPool_attribute attr, const void *value)
{
	switch (attr) {
	case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
		pool->reuse[attr - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] = *(const int *)value;
		return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
		pool->threshold = *(const cuuint64_t *)value;
		return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
	case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
		if (*(const cuuint64_t *)value)
			return CUDA_ERROR_INVALID_VALUE;
		pool->used_high = pool->used;
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
}

API CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
	CUresult result = value ? enter_pool(pool) : CUDA_ERROR_INVALID_VALUE;

	return result == CUDA_SUCCESS ? leave(set(pool, attr, value)) : result;
}

static CUresult get(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
	switch (attr) {
	case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
		*(int *)value = pool->reuse[attr - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES];
		return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
		*(cuuint64_t *)value = pool->threshold;
		return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
	case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
		*(cuuint64_t *)value = pool->used;
		return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
	case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
		*(cuuint64_t *)value = pool->used_high;
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
}

API CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
	CUresult result = value ? enter_pool(pool) : CUDA_ERROR_INVALID_VALUE;

	return result == CUDA_SUCCESS ? leave(get(pool, attr, value)) : result;
}

API CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)
{
	CUresult result = enter_pool(pool);

	(void)minBytesToKeep;
	return result == CUDA_SUCCESS ? leave(CUDA_SUCCESS) : result;
}

/* All devices share one memory. */
API CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
	CUresult result = map || !count ? enter_pool(pool) : CUDA_ERROR_INVALID_VALUE;

	if (result != CUDA_SUCCESS)
		return result;
	for (size_t i = 0; i < count; i++)
		if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || !is_device(map[i].location.id) ||
		    (map[i].location.id == pool->device && map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE))
			result = CUDA_ERROR_INVALID_VALUE;
	return leave(result);
}

API CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool memPool, CUmemLocation *location)
{
	CUresult result = flags && location ? enter_pool(memPool) : CUDA_ERROR_INVALID_VALUE;

	if (result != CUDA_SUCCESS)
		return result;
	*flags = location->id == memPool->device ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
	return leave(CUDA_SUCCESS);
}

/* `pool` NULL: the current one of the stream's device. */
static CUresult alloc(CUdeviceptr *dptr, size_t size, CUmemoryPool pool, CUstream handle)
{
	CUstream stream;
	CUresult result = enter_stream(handle, &stream);
	CUdevice device;

	if (result != CUDA_SUCCESS)
		return result;
	if (pool && !is_pool(pool))
		return leave(CUDA_ERROR_INVALID_VALUE);
	/* A graph would own the memory, and there are no such nodes here. */
	if (stream->capture)
		return leave(CUDA_ERROR_NOT_SUPPORTED);
	device = stream->context->device;
	if (!pool)
		pool = current[device] ? current[device] : default_of(device);
	leave(CUDA_SUCCESS);
	result = cuMemAlloc_v2(dptr, size);
	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&gpu_lock);
	range_from(*dptr, RANGE_DEVICE)->pool = pool;
	pool_took(pool, size);
	return leave(CUDA_SUCCESS);
}

API CUresult cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
	return alloc(dptr, bytesize, NULL, hStream);
}

API CUresult cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream)
{
	return pool ? alloc(dptr, bytesize, pool, hStream) : CUDA_ERROR_INVALID_VALUE;
}

/* Of memory of cuMemAlloc, too. It waits for more than it must. */
API CUresult cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream)
{
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	leave(CUDA_SUCCESS);
	return dptr ? cuMemFree_v2(dptr) : CUDA_ERROR_INVALID_VALUE;
}
