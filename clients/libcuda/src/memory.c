// SPDX-License-Identifier: MIT
/*
 * Memory that can outlive its program: cuMemAlloc answered with exportable physical memory, mapped in
 * a window of addresses that the proxy reserves once per device. Off unless there is a daemon to bring
 * it to (MPSD_VAULT_SOCKET), or MPSD_DEBUG=vault=1 asks for it; MPSD_DEBUG=vault=0 turns it off in any case.
 *
 * Memory of cuMemAlloc ends with its context, and mapped memory does not: so this is for primary
 * contexts, whose end the proxy sees. Whatever cannot be done this way is done by the real driver's
 * own cuMemAlloc, and counted. None of this is on the path of a launch, so a lock is fine.
 */
#include "memory.h"

#include <pthread.h>

#include "arena.h"
#include "capture.h"
#include "debug.h"
#include "exact/exact.h"
#include "failover/carry.h"
#include "failover/line.h"
#include "failover/mirror.h"
#include "failover/pools.h"
#include "ipc.h"
#include "launches.h"
#include "marks.h"
#include "notes.h"
#include "physical.h"
#include "proxy.h"
#include "stats.h"
#include "vault.h"
#include "window.h"
#include "windows.h"
#include "zones.h"

#define windows mpsd_windows
#define lock mpsd_windows_lock

struct window windows[DEVICES];
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

bool mpsd_memory_wanted(void)
{
	return mpsd_debug_number(MPSD_DEBUG_VAULT, mpsd_vault_offered(), 1, 0, 1);
}

static void open_window(struct window *window, CUdevice device)
{
	CUmemAllocationProp property = mpsd_window_property(device);
	size_t size, granularity = 0, lead = mpsd_zones_far();
	CUdeviceptr base;

	window->tried = true;
	if (real_cuMemGetAllocationGranularity(&granularity, &property, CU_MEM_ALLOC_GRANULARITY_MINIMUM) ||
	    ARENA_GRANULE % granularity || !mpsd_window_reserve(device, mpsd_zones_size(), &lead, &base, &size))
		return;
	window->open = arena_open(&window->arena, base, size, lead, mpsd_zones_size());
	if (!window->open) {
		mpsd_window_give_up(device, base, size);
		return;
	}
	mpsd_zones_window(device, base, lead, size);
	mpsd_mirror_window(device, base, size);
	mpsd_ledger_start();
}

struct window *mpsd_windows_of(CUdevice device)
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

struct window *mpsd_windows_at(CUdeviceptr address)
{
	for (int i = 0; i < DEVICES; i++)
		if (windows[i].open && address - windows[i].arena.base <
		    windows[i].arena.granules * (CUdeviceptr)ARENA_GRANULE)
			return &windows[i];
	return NULL;
}

/* Addresses that were in quarantine long enough. */
void mpsd_windows_take_back(void)
{
	struct arena_range range;
	CUdevice device;

	while (mpsd_zones_out(&device, &range))
		arena_give(&windows[device].arena, range);
}

bool mpsd_windows_tell_tail(struct window *window)
{
	return mpsd_zones_tail((CUdevice)(window - windows), arena_tail(&window->arena));
}

static uint64_t find_address(struct window *window, size_t size, struct arena_range *fresh)
{
	struct arena_range lost;
	uint64_t address;

	mpsd_windows_take_back();
	address = arena_alloc(&window->arena, size, fresh);
	/* What is larger than all of the window finds no address in it however many there are. */
	if (!address && size <= window->arena.granules * (size_t)ARENA_GRANULE) {
		mpsd_zones_empty();
		mpsd_windows_take_back();
		address = arena_alloc(&window->arena, size, fresh);
	}
	if (!address || !fresh->size || mpsd_windows_tell_tail(window))
		return address;
	/* Addresses under a zone that cannot be taken away are never given out again. */
	arena_free(&window->arena, address, &lost);
	return 0;
}

#define NO_ADDRESS CUDA_ERROR_NOT_FOUND	/* left in the window: what others give is of no use */

static CUresult alloc_in(struct window *window, CUdevice device, CUdeviceptr *dptr, size_t size)
{
	struct arena_range fresh, empty;
	uint64_t address = find_address(window, size, &fresh);
	CUresult result;

	if (!address)
		return NO_ADDRESS;
	result = mpsd_physical_map(fresh, device, window->peers);
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

/* `keep`: the addresses of an empty piece go into quarantine first. Its memory never does. */
CUresult mpsd_windows_free(struct window *window, CUdeviceptr address, bool keep)
{
	struct arena_range found, empty;

	if (!arena_find(&window->arena, address, &found) || !arena_free(&window->arena, address, &empty))
		return CUDA_ERROR_INVALID_VALUE;
	mpsd_ledger_freed(address);
	mpsd_capture_forget(address);
	mpsd_pools_forget(address);
	if (empty.size) {
		mpsd_share_forget(empty.base);
		mpsd_still_gone(empty.base);
		mpsd_vault_drop(empty.base);
		mpsd_physical_unmap(empty);
		if (!mpsd_zones_freed(empty.base, keep))
			arena_give(&window->arena, empty);
		mpsd_windows_take_back();
		mpsd_windows_tell_tail(window);
	}
	mpsd_mark_forget(found.base);
	mpsd_stats->vault_allocations--;
	mpsd_stats->vault_bytes -= found.size;
	mpsd_stats->vault_mapped -= empty.size;
	return CUDA_SUCCESS;
}

bool mpsd_memory_find(CUdeviceptr address, struct mpsd_allocation *allocation)
{
	struct arena_range found, piece;
	struct window *window;
	bool is;

	if (!mpsd_span_may_hold(&mpsd_windows_span, address) || mpsd_window_is_lost())
		return false;
	pthread_mutex_lock(&lock);
	window = mpsd_windows_at(address);
	is = window && arena_find(&window->arena, address, &found) &&
	     arena_piece(&window->arena, address, &piece);
	if (is)
		*allocation = (struct mpsd_allocation){
			found.base, found.size, window->primary, (CUdevice)(window - windows),
			piece.base, piece.size, mpsd_ipc_is_at(piece.base),
		};
	pthread_mutex_unlock(&lock);
	return is && (!allocation->is_imported || mpsd_ipc_narrow(allocation, address));
}

static CUresult free_now(CUdeviceptr address, CUcontext owner)
{
	CUresult result = mpsd_memory_wait(owner);

	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&lock);
	result = mpsd_is_left() ? MPSD_AGAIN : mpsd_windows_free(mpsd_windows_at(address), address, true);
	pthread_mutex_unlock(&lock);
	return result;
}

bool mpsd_memory_free_put_off(void)
{
	struct mpsd_allocation allocation;
	CUdeviceptr address;
	bool was = false;
	CUresult result;

	while (mpsd_capture_take(&address)) {
		if (!mpsd_memory_find(address, &allocation))
			continue;
		was = true;
		/* Otherwise the owner is of this copy. */
		result = mpsd_is_left() ? MPSD_AGAIN : free_now(address, allocation.owner);
		if (result == CUDA_SUCCESS || result == CUDA_ERROR_INVALID_VALUE)
			continue;
		/* A wait is not for this caller, or for nobody now: in a function of the host, for one. */
		mpsd_capture_put_off(address);
		break;
	}
	return was;
}

/*
 * cuMemFree waits for running work, and programs rely on it; cuMemUnmap need not. So the wait comes
 * first, without the lock: the work may need an allocation of another thread's to end.
 */
CUresult wrap_cuMemFree_v2(CUdeviceptr dptr)
{
	struct mpsd_allocation allocation;
	CUresult result;

	if (!mpsd_memory_find(dptr, &allocation) || allocation.base != dptr || allocation.is_imported)
		return real_cuMemFree_v2(dptr);
	/* Otherwise the owner is of this copy. */
	if (mpsd_is_left())
		return MPSD_AGAIN;
	mpsd_memory_free_put_off();
	if (!mpsd_capture_active())
		return free_now(dptr, allocation.owner);
	result = mpsd_capture_probe();
	return result == CUDA_SUCCESS ? mpsd_capture_put_off(dptr) : result;
}

static CUresult alloc_now(CUdevice device, CUdeviceptr *dptr, size_t size, bool *left)
{
	CUresult result = CUDA_ERROR_NOT_SUPPORTED;
	struct window *window;

	pthread_mutex_lock(&lock);
	*left = mpsd_is_left();
	window = *left ? NULL : mpsd_windows_of(device);
	if (window)
		result = alloc_in(window, device, dptr, size);
	pthread_mutex_unlock(&lock);
	return result;
}

/*
 * Whatever is wrong with the arguments or the context is for the driver to say. No allocation waits for work, which
 * may need what the program does after it: only where memory has run out, for what was freed during a capture.
 */
CUresult wrap_cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
	CUresult result;
	CUdevice device;
	bool left;

	if (!dptr || !bytesize || real_cuCtxGetDevice(&device) != CUDA_SUCCESS)
		return real_cuMemAlloc_v2(dptr, bytesize);
	if (mpsd_capture_active()) {
		CUresult said = mpsd_capture_probe();

		if (said != CUDA_SUCCESS)
			return said;
	}
	result = alloc_now(device, dptr, bytesize, &left);
	/* In that mode it is somebody's who is about to save it: calls.c sees to it. */
	if ((result == CUDA_ERROR_OUT_OF_MEMORY || result == NO_ADDRESS) && !mpsd_exact() && mpsd_memory_free_put_off())
		result = alloc_now(device, dptr, bytesize, &left);
	if (result == CUDA_SUCCESS)
		return result;
	if (!left && mpsd_thread.inside && (result == CUDA_ERROR_OUT_OF_MEMORY || mpsd_thread.inside == MPSD_INSIDE_ONLY))
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (!left)
		result = real_cuMemAlloc_v2(dptr, bytesize);
	if (left || mpsd_is_left())
		return MPSD_AGAIN;
	if (result == CUDA_SUCCESS)
		mpsd_count(vault_passed);
	return mpsd_line_made(result, "cuMemAlloc outside the window");
}

CUresult mpsd_memory_alloc_inside(CUdeviceptr *dptr, size_t size, enum mpsd_inside inside)
{
	CUresult result;

	mpsd_thread.inside = (uint8_t)inside;
	result = wrap_cuMemAlloc_v2(dptr, size);
	mpsd_thread.inside = MPSD_INSIDE_OR_NOT;
	return result;
}

bool mpsd_memory_is_in_window(CUdeviceptr address)
{
	bool is;

	if (!mpsd_span_may_hold(&mpsd_windows_span, address) || mpsd_window_is_lost())
		return false;
	pthread_mutex_lock(&lock);
	is = mpsd_windows_at(address) != NULL;
	pthread_mutex_unlock(&lock);
	return is;
}

/* For ipc.c and peer.c */

CUresult mpsd_memory_adopt(CUdevice device, size_t size, CUmemGenericAllocationHandle handle,
			   CUdeviceptr *base)
{
	CUresult result = CUDA_ERROR_NOT_SUPPORTED;
	struct arena_range fresh, empty;
	struct window *window;

	pthread_mutex_lock(&lock);
	window = size && size % ARENA_GRANULE == 0 ? mpsd_windows_of(device) : NULL;
	*base = window ? find_address(window, size, &fresh) : 0;
	if (*base) {
		result = mpsd_physical_place(fresh, 1u << device | window->peers, handle);
		if (result == CUDA_SUCCESS) {
			mpsd_zones_born(fresh.base, fresh.size, device);
		} else {
			arena_free(&window->arena, *base, &empty);
			arena_give(&window->arena, empty);
		}
	}
	pthread_mutex_unlock(&lock);
	return result;
}

void mpsd_windows_unmap_adopted(struct window *window, CUdeviceptr base)
{
	struct arena_range empty;

	if (!window || !arena_free(&window->arena, base, &empty) || !empty.size)
		return;
	mpsd_physical_unmap(empty);
	if (!mpsd_zones_freed(empty.base, false))
		arena_give(&window->arena, empty);
}

void mpsd_memory_disown(CUdeviceptr base)
{
	pthread_mutex_lock(&lock);
	mpsd_windows_unmap_adopted(mpsd_windows_at(base), base);
	pthread_mutex_unlock(&lock);
}
