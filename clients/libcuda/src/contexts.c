// SPDX-License-Identifier: MIT
/* Windows and the contexts that they belong to: which these are, their peers, their end. */
#include "arena.h"
#include "capture.h"
#include "failover/carry.h"
#include "ipc.h"
#include "launches.h"
#include "memory.h"
#include "physical.h"
#include "proxy.h"
#include "windows.h"
#include "zones.h"

#define windows mpsd_windows
#define lock mpsd_windows_lock

bool mpsd_memory_is_primary(CUcontext context, CUdevice *device)
{
	bool is = false;

	pthread_mutex_lock(&lock);
	for (int i = 0; i < DEVICES && !is && context; i++) {
		is = windows[i].primary == context;
		*device = i;
	}
	pthread_mutex_unlock(&lock);
	return is;
}

/* With the lock held. What is mapped already keeps its own device. */
static CUresult set_peer(struct window *window, CUdevice peer, bool on)
{
	CUmemAccess_flags flags = on ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
	struct arena_range piece = { window->arena.base, 0 };
	CUresult result = CUDA_SUCCESS;

	window->peers = on ? window->peers | 1u << peer : window->peers & ~(1u << peer);
	while (window->open && arena_next_piece(&window->arena, piece.base + piece.size, &piece)) {
		struct arena_range held;
		CUresult one;

		/* Who may access what the program has mapped itself it says itself. */
		if (arena_held(&window->arena, piece.base, &held))
			continue;
		one = mpsd_physical_access(piece, 1u << peer, flags);
		result = result ? result : one;
	}
	return result;
}

CUresult mpsd_memory_set_peer(CUdevice home, CUdevice peer, bool on)
{
	CUresult result;

	pthread_mutex_lock(&lock);
	result = set_peer(&windows[home], peer, on);
	pthread_mutex_unlock(&lock);
	return result;
}

/* The end of a context, for primary.c */

static void drop_all(struct window *window)
{
	struct arena_range found;

	while (window->open && arena_first(&window->arena, &found)) {
		if (mpsd_ipc_forget(found.base))
			mpsd_windows_unmap_adopted(window, found.base);
		else
			mpsd_windows_free(window, found.base, false);
	}
	mpsd_zones_ended((CUdevice)(window - windows));
	mpsd_windows_take_back();
}

/* With it ends what was enabled between it and others. */
static void drop_peers(CUdevice dev)
{
	windows[dev].peers = 0;
	for (int i = 0; i < DEVICES; i++)
		if (windows[i].peers >> dev & 1)
			set_peer(&windows[i], dev, false);
}

void mpsd_memory_begin(CUdevice dev, CUcontext primary)
{
	if (dev < 0 || dev >= DEVICES)
		return;
	pthread_mutex_lock(&lock);
	/* What a move has overtaken is of the copy that was left. */
	if (!mpsd_is_left()) {
		windows[dev].primary = primary;
		mpsd_launches_context(primary);
	}
	pthread_mutex_unlock(&lock);
}

/* A release may or may not have been the last one; the driver knows. */
void mpsd_memory_end(CUdevice dev)
{
	unsigned int flags;
	int active = 1;

	if (dev < 0 || dev >= DEVICES)
		return;
	mpsd_ipc_hold();
	pthread_mutex_lock(&lock);
	if (real_cuDevicePrimaryCtxGetState(dev, &flags, &active) == CUDA_SUCCESS && !active && !mpsd_is_left()) {
		drop_all(&windows[dev]);
		drop_peers(dev);
		mpsd_capture_context_ended(dev);
		mpsd_launches_no_context(windows[dev].primary);
		windows[dev].primary = NULL;
	}
	pthread_mutex_unlock(&lock);
	mpsd_ipc_resume();
}
