// SPDX-License-Identifier: MIT
/*
 * Memory pools as objects: the program's handles, attributes and current pools. The default pools are in each driver
 * instance; one that the program has made is the proxy's alone after a move.
 */
#include <stdlib.h>
#include <string.h>

#include "exact/order.h"
#include "failover/line.h"
#include "failover/pools.h"
#include "memory.h"
#include "physical.h"

static struct mpsd_pool defaults[MPSD_DEVICES] = {
	[0 ... MPSD_DEVICES - 1] = { .is_default = true, .reuse = { 1, 1, 1 } },
};
static struct mpsd_pool *made;		/* with the lock */
static struct mpsd_pool *current[MPSD_DEVICES];	/* with the lock. NULL: the default one */
static bool is_drivers[MPSD_DEVICES];	/* the current one is the driver's alone */

static bool is_device(CUdevice device)
{
	return device >= 0 && device < MPSD_DEVICES;
}

struct mpsd_pool *mpsd_pools_default(CUdevice device)
{
	defaults[device].device = device;
	return &defaults[device];
}

struct mpsd_pool *mpsd_pools_current(CUdevice device)
{
	struct mpsd_pool *pool;

	mpsd_pools_lock();
	pool = is_drivers[device] ? NULL : current[device] ? current[device] : mpsd_pools_default(device);
	mpsd_pools_unlock();
	return pool;
}

/* With the lock. */
static struct mpsd_pool *find(CUmemoryPool name)
{
	struct mpsd_pool *pool = made;

	for (int i = 0; name && i < MPSD_DEVICES; i++)
		if (defaults[i].name == name)
			return mpsd_pools_default(i);
	while (pool && (pool->is_gone || pool->name != name))
		pool = pool->next;
	return pool;
}

struct mpsd_pool *mpsd_pools_named(CUmemoryPool name)
{
	struct mpsd_pool *pool;

	mpsd_pools_lock();
	pool = find(name);
	mpsd_pools_unlock();
	return pool;
}

CUmemoryPool mpsd_pools_native(CUmemoryPool name)
{
	uint64_t moves = mpsd_tables()->moves;
	struct mpsd_pool *pool = mpsd_pools_named(name);
	CUmemoryPool native;

	if (!pool)
		return moves ? NULL : name;
	if (!pool->is_default)
		return pool->since == moves ? name : NULL;
	return real_cuDeviceGetDefaultMemPool(&native, pool->device) == CUDA_SUCCESS ? native : NULL;
}

/* Whether the present driver instance answers for this handle. It says, too, that a null one is none. */
static bool is_drivers_to_say(CUmemoryPool name, CUmemoryPool native)
{
	return native || !name;
}

/* The handle that the program got first, whichever instance that is of. */
static CUmemoryPool name_of_default(CUdevice device, CUmemoryPool native)
{
	CUmemoryPool name;

	mpsd_pools_lock();
	if (!defaults[device].name)
		defaults[device].name = native;
	name = defaults[device].name;
	mpsd_pools_unlock();
	return name;
}

CUmemoryPool mpsd_pools_ask_default(CUdevice device)
{
	CUmemoryPool native;

	return real_cuDeviceGetDefaultMemPool(&native, device) == CUDA_SUCCESS && !mpsd_is_left()
		       ? name_of_default(device, native)
		       : NULL;
}

CUresult make_cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev)
{
	CUresult result = mpsd_answered(inner_cuDeviceGetDefaultMemPool(pool_out, dev));

	if (result == CUDA_SUCCESS && is_device(dev))
		*pool_out = name_of_default(dev, *pool_out);
	return result;
}

CUresult make_cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)
{
	CUresult result = mpsd_answered(inner_cuDeviceGetMemPool(pool, dev));
	struct mpsd_pool *now = result == CUDA_SUCCESS && is_device(dev) ? mpsd_pools_current(dev) : NULL;

	if (!now)
		return result;
	if (!now->is_default) {
		*pool = now->name;
		return CUDA_SUCCESS;
	}
	return make_cuDeviceGetDefaultMemPool(pool, dev);
}

static CUresult set_current(CUdevice dev, struct mpsd_pool *pool, CUmemoryPool native)
{
	CUresult result = native ? inner_cuDeviceSetMemPool(dev, native) : CUDA_SUCCESS;

	if (result != CUDA_SUCCESS)
		return result;
	mpsd_pools_lock();
	current[dev] = pool;
	is_drivers[dev] = !pool;
	mpsd_pools_unlock();
	return CUDA_SUCCESS;
}

CUresult make_cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool)
{
	CUmemoryPool native = mpsd_pools_native(pool);
	struct mpsd_pool *to = mpsd_pools_named(pool);

	if (!pool || !is_device(dev))
		return inner_cuDeviceSetMemPool(dev, pool);
	if (to && to->device != dev)
		return CUDA_ERROR_INVALID_VALUE;
	if (to)
		return set_current(dev, to, native);
	return MPSD_POOLS_PASS("cuDeviceSetMemPool", native ? set_current(dev, NULL, native) : CUDA_ERROR_NOT_SUPPORTED);
}

/* Device memory without handles, limits and special uses. */
static bool is_plain(const CUmemPoolProps *props)
{
	const char *rest = (const char *)&props->maxSize;
	size_t size = sizeof(*props) - offsetof(CUmemPoolProps, maxSize);
	bool is = props->allocType == CU_MEM_ALLOCATION_TYPE_PINNED && props->handleTypes == CU_MEM_HANDLE_TYPE_NONE &&
		  props->location.type == CU_MEM_LOCATION_TYPE_DEVICE && is_device(props->location.id);

	for (size_t i = 0; i < size; i++)
		is &= !rest[i];
	return is;
}

/* Another instance may have used the same handle for a pool that the program still has. */
static CUresult create(CUmemoryPool *pool, const CUmemPoolProps *props)
{
	CUmemoryPool taken;
	CUresult result = inner_cuMemPoolCreate(pool, props);

	if (result != CUDA_SUCCESS || !mpsd_pools_named(*pool))
		return result;
	taken = *pool;
	result = create(pool, props);
	inner_cuMemPoolDestroy(taken);
	return result;
}

CUresult make_cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)
{
	struct mpsd_pool *record;
	CUresult result;

	if (!pool || !poolProps)
		return inner_cuMemPoolCreate(pool, poolProps);
	if (!is_plain(poolProps))
		return MPSD_POOLS_PASS("cuMemPoolCreate", inner_cuMemPoolCreate(pool, poolProps));
	record = calloc(1, sizeof(*record));
	if (!record)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = mpsd_answered(create(pool, poolProps));
	if (result != CUDA_SUCCESS) {
		free(record);
		return result;
	}
	*record = (struct mpsd_pool){ .name = *pool, .device = poolProps->location.id, .reuse = { 1, 1, 1 },
				      .since = mpsd_tables()->moves };
	mpsd_pools_lock();
	record->next = made;
	made = record;
	mpsd_pools_unlock();
	return CUDA_SUCCESS;
}

/* The record stays: its blocks in use lead to it. */
CUresult make_cuMemPoolDestroy(CUmemoryPool pool)
{
	CUmemoryPool native = mpsd_pools_native(pool);
	struct mpsd_pool *gone = mpsd_pools_named(pool);
	CUresult result = is_drivers_to_say(pool, native) ? inner_cuMemPoolDestroy(native)
				 : gone ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;

	if (result != CUDA_SUCCESS || !gone || gone->is_default)
		return result;
	mpsd_pools_inherit(gone);
	mpsd_pools_lock();
	for (int i = 0; i < MPSD_DEVICES; i++)
		if (current[i] == gone)
			current[i] = NULL;
	mpsd_pools_unlock();
	return CUDA_SUCCESS;
}

/* Attributes: the driver checks them if it has the pool, and counts what it serves itself. */

static CUresult set(struct mpsd_pool *pool, CUmemPool_attribute attribute, const void *value)
{
	switch (attribute) {
	case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
		pool->reuse[attribute - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] = *(const int *)value;
		return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
		pool->threshold = *(const cuuint64_t *)value;
		mpsd_pools_set_over(pool);
		return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
	case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
		if (*(const cuuint64_t *)value)
			return CUDA_ERROR_INVALID_VALUE;
		if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
			pool->used_high = pool->used;
		else
			pool->reserved_high = pool->reserved;
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
}

CUresult make_cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
	CUmemoryPool native = mpsd_pools_native(pool);
	struct mpsd_pool *ours = mpsd_pools_named(pool);
	CUresult result = is_drivers_to_say(pool, native) ? inner_cuMemPoolSetAttribute(native, attr, value)
				 : ours && value ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;

	if (result != CUDA_SUCCESS || !ours)
		return result;
	mpsd_pools_lock();
	result = set(ours, attr, value);
	mpsd_pools_unlock();
	return result;
}

static bool get(const struct mpsd_pool *pool, CUmemPool_attribute attribute, void *value)
{
	switch (attribute) {
	case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
		*(int *)value = pool->reuse[attribute - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES];
		return true;
	case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
		*(cuuint64_t *)value = pool->threshold;
		return true;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
		*(cuuint64_t *)value += pool->reserved;
		return true;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
		*(cuuint64_t *)value += pool->reserved_high;
		return true;
	case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
		*(cuuint64_t *)value += pool->used;
		return true;
	case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
		*(cuuint64_t *)value += pool->used_high;
		return true;
	default:
		return false;
	}
}

static bool is_count(CUmemPool_attribute attribute)
{
	return attribute >= CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT && attribute <= CU_MEMPOOL_ATTR_USED_MEM_HIGH;
}

CUresult make_cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
	CUmemoryPool native = mpsd_pools_native(pool);
	struct mpsd_pool *ours = mpsd_pools_named(pool);
	CUresult result = is_drivers_to_say(pool, native)
				 ? mpsd_answered(inner_cuMemPoolGetAttribute(native, attr, value))
				 : ours && value ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	bool is_known;

	if (result != CUDA_SUCCESS || !ours)
		return result;
	if (!native && is_count(attr))
		*(cuuint64_t *)value = 0;
	mpsd_pools_lock();
	is_known = get(ours, attr, value);
	mpsd_pools_unlock();
	return is_known || native ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult make_cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)
{
	CUmemoryPool native = mpsd_pools_native(pool);
	struct mpsd_pool *ours = mpsd_pools_named(pool);
	CUresult result = is_drivers_to_say(pool, native) ? inner_cuMemPoolTrimTo(native, minBytesToKeep)
				 : ours ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;

	if (result == CUDA_SUCCESS && ours)
		mpsd_pools_trim(ours, minBytesToKeep);
	return result;
}

/* Access by other devices: new memory is the driver's from then on, and what there is in the window is opened. */

static bool is_for_others(const struct mpsd_pool *pool, const CUmemAccessDesc *map, size_t count)
{
	for (size_t i = 0; map && i < count; i++)
		if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || map[i].location.id != pool->device)
			return true;
	return false;
}

static CUresult set_access(struct mpsd_pool *pool, CUmemoryPool native, const CUmemAccessDesc *map, size_t count)
{
	CUresult result = native ? inner_cuMemPoolSetAccess(native, map, count) : CUDA_ERROR_NOT_SUPPORTED;

	for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++)
		if (map[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE && map[i].location.id != pool->device &&
		    is_device(map[i].location.id))
			result = mpsd_memory_set_peer(pool->device, map[i].location.id,
						      map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE);
	return result;
}

CUresult make_cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
	CUmemoryPool native = mpsd_pools_native(pool);
	struct mpsd_pool *ours = mpsd_pools_named(pool);

	if (ours && is_for_others(ours, map, count))
		return MPSD_POOLS_PASS("cuMemPoolSetAccess", set_access(ours, native, map, count));
	if (ours && !native)
		return CUDA_SUCCESS;
	return is_drivers_to_say(pool, native) ? inner_cuMemPoolSetAccess(native, map, count) : CUDA_ERROR_INVALID_VALUE;
}

CUresult make_cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool memPool, CUmemLocation *location)
{
	CUmemoryPool native = mpsd_pools_native(memPool);
	struct mpsd_pool *ours = mpsd_pools_named(memPool);

	if (is_drivers_to_say(memPool, native))
		return mpsd_answered(inner_cuMemPoolGetAccess(flags, native, location));
	if (!ours || !flags || !location)
		return CUDA_ERROR_INVALID_VALUE;
	*flags = location->type == CU_MEM_LOCATION_TYPE_DEVICE && location->id == ours->device
			 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
			 : CU_MEM_ACCESS_FLAGS_PROT_NONE;
	return CUDA_SUCCESS;
}
