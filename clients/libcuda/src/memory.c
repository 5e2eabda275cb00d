// SPDX-License-Identifier: MIT
/*
 * Memory that can outlive its program: cuMemAlloc answered with exportable physical memory, mapped in
 * a window of addresses that the proxy reserves once per device. Off unless there is a daemon to bring
 * it to (MPSD_VAULT_SOCKET), or MPSD_VAULT=1 asks for it; MPSD_VAULT=0 turns it off in any case.
 *
 * Memory of cuMemAlloc ends with its context, and mapped memory does not: so this is for primary
 * contexts, whose end the proxy sees. Whatever cannot be done this way is done by the real driver's
 * own cuMemAlloc, and counted. None of this is on the path of a launch, so a lock is fine.
 */
#include "memory.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "arena.h"
#include "launches.h"
#include "notes.h"
#include "proxy.h"
#include "stats.h"
#include "vault.h"
#include "window.h"
#include "zones.h"

#define DEVICES 32
#define PITCH_ALIGNMENT ((size_t)512)

static struct window {
	struct arena arena;
	bool tried, open;
	CUcontext primary;	/* the only context whose allocations come here; NULL: none is alive */
} windows[DEVICES];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

bool mpsd_memory_wanted(void)
{
	const char *wish = secure_getenv("MPSD_VAULT");

	return wish ? !strcmp(wish, "1") : mpsd_vault_offered();
}

static CUmemAllocationProp property_of(CUdevice device)
{
	return (CUmemAllocationProp){
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device },
	};
}

static void open_window(struct window *window, CUdevice device)
{
	CUmemAllocationProp property = property_of(device);
	size_t total = 0, size, granularity = 0;
	CUdeviceptr base;

	window->tried = true;
	if (real_cuMemGetAllocationGranularity(&granularity, &property, CU_MEM_ALLOC_GRANULARITY_MINIMUM) ||
	    ARENA_GRANULE % granularity || real_cuDeviceTotalMem_v2(&total, device))
		return;
	base = mpsd_window_reserve(device, total, mpsd_zones_size(), &size);
	if (!base)
		return;
	window->open = arena_open(&window->arena, base, size, mpsd_zones_size());
	if (window->open)
		mpsd_ledger_start();
	else
		real_cuMemAddressFree(base, size);
}

/* The window for allocations that the current context makes; NULL if they are not for one. */
static struct window *window_of(CUdevice device)
{
	struct window *window;
	CUcontext current;

	if (device < 0 || device >= DEVICES || real_cuCtxGetCurrent(&current) != CUDA_SUCCESS)
		return NULL;
	window = &windows[device];
	if (!window->primary || current != window->primary)
		return NULL;
	if (!window->tried)
		open_window(window, device);
	return window->open ? window : NULL;
}

/* The window that an address lies in; its place in the array is the device. */
static struct window *window_at(CUdeviceptr address)
{
	for (int i = 0; i < DEVICES; i++)
		if (windows[i].open && address - windows[i].arena.base <
		    windows[i].arena.granules * (CUdeviceptr)ARENA_GRANULE)
			return &windows[i];
	return NULL;
}

/*
 * What the program has freed is free when the daemon has let go of it too: before memory is said to be
 * out, that is waited for, a quarter of a second at most.
 */
static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *property)
{
	CUresult result = real_cuMemCreate(handle, size, property, 0);

	if (result == CUDA_ERROR_OUT_OF_MEMORY && mpsd_vault_settle())
		result = real_cuMemCreate(handle, size, property, 0);
	return result;
}

/* The mapping alone keeps the physical memory; the vault's side takes the handle, or it is released. */
static CUresult map(struct arena_range range, CUdevice device)
{
	CUmemAllocationProp property = property_of(device);
	CUmemAccessDesc access = {
		.location = property.location,
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
	CUmemGenericAllocationHandle handle;
	CUresult result;

	if (!range.size)
		return CUDA_SUCCESS;
	result = create(&handle, range.size, &property);
	if (result != CUDA_SUCCESS)
		return result;
	result = real_cuMemMap(range.base, range.size, 0, handle, 0);
	if (result == CUDA_SUCCESS) {
		result = real_cuMemSetAccess(range.base, range.size, &access, 1);
		if (result != CUDA_SUCCESS)
			real_cuMemUnmap(range.base, range.size);
	}
	if (result != CUDA_SUCCESS || !mpsd_vault_put(range.base, range.size, device, handle))
		real_cuMemRelease(handle);
	return result;
}

/* Addresses that were in quarantine long enough. */
static void take_back(void)
{
	struct arena_range range;
	CUdevice device;

	while (mpsd_zones_out(&device, &range))
		arena_give(&windows[device].arena, range);
}

static uint64_t find_address(struct arena *arena, size_t size, struct arena_range *fresh)
{
	uint64_t address;

	take_back();
	address = arena_alloc(arena, size, fresh);
	if (address)
		return address;
	mpsd_zones_empty();
	take_back();
	return arena_alloc(arena, size, fresh);
}

static CUresult alloc_in(struct window *window, CUdevice device, CUdeviceptr *dptr, size_t size)
{
	struct arena_range fresh, empty;
	uint64_t address = find_address(&window->arena, size, &fresh);
	CUresult result;

	if (!address)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = map(fresh, device);
	if (result != CUDA_SUCCESS) {
		arena_free(&window->arena, address, &empty);
		arena_give(&window->arena, empty);
		return result;
	}
	if (fresh.size)
		mpsd_zones_born(fresh.base, fresh.size, device);
	mpsd_ledger_born(address, size, (uint32_t)device);
	mpsd_stats->vault_allocations++;
	mpsd_stats->vault_bytes += size;
	mpsd_stats->vault_mapped += fresh.size;
	*dptr = address;
	return CUDA_SUCCESS;
}

/* Whatever is wrong with the arguments or the context is for the driver to say. */
CUresult wrap_cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
	struct window *window;
	CUresult result = CUDA_ERROR_NOT_SUPPORTED;
	CUdevice device;

	if (!dptr || !bytesize || real_cuCtxGetDevice(&device) != CUDA_SUCCESS)
		return real_cuMemAlloc_v2(dptr, bytesize);
	pthread_mutex_lock(&lock);
	window = window_of(device);
	if (window)
		result = alloc_in(window, device, dptr, bytesize);
	pthread_mutex_unlock(&lock);
	if (result == CUDA_SUCCESS)
		return result;
	result = real_cuMemAlloc_v2(dptr, bytesize);
	if (result == CUDA_SUCCESS)
		mpsd_count(vault_passed);
	return result;
}

CUresult wrap_cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
				 unsigned int ElementSizeBytes)
{
	size_t pitch = (WidthInBytes + PITCH_ALIGNMENT - 1) / PITCH_ALIGNMENT * PITCH_ALIGNMENT;
	CUresult result;

	if (!dptr || !pPitch || !WidthInBytes || !Height || pitch < WidthInBytes || pitch > SIZE_MAX / Height ||
	    (ElementSizeBytes != 4 && ElementSizeBytes != 8 && ElementSizeBytes != 16))
		return real_cuMemAllocPitch_v2(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
	result = wrap_cuMemAlloc_v2(dptr, pitch * Height);
	if (result == CUDA_SUCCESS)
		*pPitch = pitch;
	return result;
}

/* `keep`: the addresses of an empty piece go into quarantine first. Its memory never does. */
static CUresult free_in(struct window *window, CUdeviceptr address, bool keep)
{
	struct arena_range found, empty;

	if (!arena_find(&window->arena, address, &found) || !arena_free(&window->arena, address, &empty))
		return CUDA_ERROR_INVALID_VALUE;
	mpsd_ledger_freed(address);
	if (empty.size) {
		mpsd_vault_drop(empty.base);
		real_cuMemUnmap(empty.base, empty.size);
		if (!mpsd_zones_freed(empty.base, keep))
			arena_give(&window->arena, empty);
		take_back();
	}
	mpsd_stats->vault_allocations--;
	mpsd_stats->vault_bytes -= found.size;
	mpsd_stats->vault_mapped -= empty.size;
	return CUDA_SUCCESS;
}

bool mpsd_memory_find(CUdeviceptr address, struct mpsd_allocation *allocation)
{
	struct arena_range found;
	struct window *window;
	bool is;

	pthread_mutex_lock(&lock);
	window = window_at(address);
	is = window && arena_find(&window->arena, address, &found);
	if (is)
		*allocation = (struct mpsd_allocation){ found.base, found.size, window->primary };
	pthread_mutex_unlock(&lock);
	return is;
}

static CUresult wait_for(CUcontext owner)
{
	CUresult result = real_cuCtxPushCurrent_v2(owner);

	if (result != CUDA_SUCCESS)
		return result;
	result = real_cuCtxSynchronize();
	real_cuCtxPopCurrent_v2(&owner);
	return result;
}

/*
 * cuMemFree waits for running work, and programs rely on it; cuMemUnmap need not. So the wait comes
 * first, without the lock: the work may need an allocation of another thread's to end.
 */
CUresult wrap_cuMemFree_v2(CUdeviceptr dptr)
{
	struct mpsd_allocation allocation;
	CUresult result;

	if (!mpsd_memory_find(dptr, &allocation) || allocation.base != dptr)
		return real_cuMemFree_v2(dptr);
	result = wait_for(allocation.owner);
	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&lock);
	result = free_in(window_at(dptr), dptr, true);
	pthread_mutex_unlock(&lock);
	return result;
}

static bool is_in_window(CUdeviceptr address)
{
	bool is;

	pthread_mutex_lock(&lock);
	is = window_at(address) != NULL;
	pthread_mutex_unlock(&lock);
	return is;
}

CUresult wrap_cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
	struct mpsd_allocation allocation;
	bool is = mpsd_memory_find(dptr, &allocation);
	CUdevice device;

	/* Where there is none, the driver would find the slab: its answer is for other addresses. */
	if ((!is && !is_in_window(dptr)) || real_cuCtxGetDevice(&device) != CUDA_SUCCESS)
		return real_cuMemGetAddressRange_v2(pbase, psize, dptr);
	if (!is)
		return CUDA_ERROR_NOT_FOUND;
	if (pbase)
		*pbase = allocation.base;
	if (psize)
		*psize = allocation.size;
	return CUDA_SUCCESS;
}

/* The end of a context */

CUresult wrap_cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
	CUresult result = real_cuDevicePrimaryCtxRetain(pctx, dev);

	if (result == CUDA_SUCCESS && dev >= 0 && dev < DEVICES) {
		pthread_mutex_lock(&lock);
		windows[dev].primary = *pctx;
		mpsd_launches_context(*pctx);
		pthread_mutex_unlock(&lock);
	}
	return result;
}

static void drop_all(struct window *window)
{
	struct arena_range found;

	while (window->open && arena_first(&window->arena, &found))
		free_in(window, found.base, false);
	mpsd_zones_empty();
	take_back();
}

/* A release may or may not have been the last one; the driver knows. */
static CUresult after_end(CUresult result, CUdevice dev)
{
	unsigned int flags;
	int active = 1;

	if (result != CUDA_SUCCESS || dev < 0 || dev >= DEVICES)
		return result;
	pthread_mutex_lock(&lock);
	if (real_cuDevicePrimaryCtxGetState(dev, &flags, &active) == CUDA_SUCCESS && !active) {
		drop_all(&windows[dev]);
		mpsd_launches_no_context(windows[dev].primary);
		windows[dev].primary = NULL;
	}
	pthread_mutex_unlock(&lock);
	return result;
}

CUresult wrap_cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
	return after_end(real_cuDevicePrimaryCtxRelease_v2(dev), dev);
}

CUresult wrap_cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
	return after_end(real_cuDevicePrimaryCtxReset_v2(dev), dev);
}

#undef cuDevicePrimaryCtxRelease
CUresult wrap_cuDevicePrimaryCtxRelease(CUdevice dev)
{
	return after_end(real_cuDevicePrimaryCtxRelease(dev), dev);
}

#undef cuDevicePrimaryCtxReset
CUresult wrap_cuDevicePrimaryCtxReset(CUdevice dev)
{
	return after_end(real_cuDevicePrimaryCtxReset(dev), dev);
}
