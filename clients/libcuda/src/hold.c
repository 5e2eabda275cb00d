// SPDX-License-Identifier: MIT
#include "hold.h"

#include <pthread.h>
#include <stdatomic.h>

#include "failover/carry.h"
#include "proxy.h"
#include "window.h"
#include "windows.h"

#define windows mpsd_windows
#define lock mpsd_windows_lock

static atomic_uint held_count;

bool mpsd_memory_find_mapped(CUdeviceptr address, struct mpsd_allocation *allocation)
{
	struct arena_range run;
	struct window *window;
	bool is;

	if (mpsd_memory_find(address, allocation))
		return true;
	if (!mpsd_span_may_hold(&mpsd_windows_span, address) || mpsd_window_is_lost())
		return false;
	pthread_mutex_lock(&lock);
	window = mpsd_windows_at(address);
	is = window && arena_run(&window->arena, address, &run);
	if (is)
		*allocation = (struct mpsd_allocation){ run.base, run.size, window->primary,
							(CUdevice)(window - windows), run.base, run.size, false };
	pthread_mutex_unlock(&lock);
	return is;
}

static struct window *current_window(void)
{
	CUdevice device;

	return real_cuCtxGetDevice(&device) == CUDA_SUCCESS ? mpsd_windows_of(device) : NULL;
}

CUresult mpsd_memory_hold(size_t size, size_t alignment, CUdeviceptr *base)
{
	CUresult result = CUDA_ERROR_NOT_SUPPORTED;
	struct arena_range held;
	struct window *window;

	pthread_mutex_lock(&lock);
	window = mpsd_is_left() ? NULL : current_window();
	if (mpsd_is_left())
		result = MPSD_AGAIN;
	mpsd_windows_take_back();
	held = (struct arena_range){ window ? arena_hold(&window->arena, size, alignment) : 0, size };
	if (held.base && mpsd_windows_tell_tail(window)) {
		atomic_fetch_add(&held_count, 1);
		result = CUDA_SUCCESS;
	}
	else if (held.base)
		arena_let_go(&window->arena, held);
	pthread_mutex_unlock(&lock);
	if (result == CUDA_SUCCESS)
		*base = held.base;
	return result;
}

CUresult mpsd_memory_let_go(CUdeviceptr base, size_t size)
{
	CUresult result = CUDA_ERROR_NOT_FOUND;
	struct arena_range held;
	struct window *window;

	pthread_mutex_lock(&lock);
	window = mpsd_windows_at(base);
	if (window && arena_held(&window->arena, base, &held))
		result = arena_let_go(&window->arena, (struct arena_range){ base, size }) ? CUDA_SUCCESS
											   : CUDA_ERROR_INVALID_VALUE;
	if (result == CUDA_SUCCESS) {
		atomic_fetch_sub(&held_count, 1);
		mpsd_windows_tell_tail(window);
	}
	pthread_mutex_unlock(&lock);
	return result;
}

bool mpsd_memory_is_held(CUdeviceptr address)
{
	struct arena_range held;
	struct window *window;
	bool is;

	if (!atomic_load(&held_count) || !mpsd_span_may_hold(&mpsd_windows_span, address) || mpsd_window_is_lost())
		return false;
	pthread_mutex_lock(&lock);
	window = mpsd_windows_at(address);
	is = window && arena_held(&window->arena, address, &held);
	pthread_mutex_unlock(&lock);
	return is;
}

bool mpsd_windows_may_map(struct arena_range range)
{
	struct window *window = mpsd_windows_at(range.base);
	struct arena_range held;

	return window && range.size && range.base % ARENA_GRANULE == 0 && range.size % ARENA_GRANULE == 0 &&
	       arena_held(&window->arena, range.base, &held) && range.base + range.size <= held.base + held.size;
}

bool mpsd_windows_map(struct arena_range range)
{
	return arena_map(&mpsd_windows_at(range.base)->arena, range);
}

void mpsd_windows_unmap(struct arena_range range)
{
	arena_unmap(&mpsd_windows_at(range.base)->arena, range);
}

void mpsd_windows_open(struct arena_range range, bool is)
{
	struct arena *arena = &mpsd_windows_at(range.base)->arena;

	if (is)
		arena_open_piece(arena, range);
	else
		arena_close_piece(arena, range);
}

bool mpsd_windows_piece(CUdeviceptr address, struct arena_range *piece)
{
	struct window *window = mpsd_windows_at(address);

	return window && arena_piece(&window->arena, address, piece);
}

CUdevice mpsd_windows_device(CUdeviceptr address)
{
	return (CUdevice)(mpsd_windows_at(address) - windows);
}
