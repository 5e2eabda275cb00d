/* SPDX-License-Identifier: MIT */
/* The windows of memory.c and what guards them, for those files that work on them too. */
#pragma once

#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "arena.h"
#include "physical.h"

#define DEVICES MPSD_DEVICES

struct window {
	struct arena arena;
	bool tried, open;
	uint32_t peers;		/* devices that may access it too, a bit for each */
	CUcontext primary;	/* the only context whose allocations come here; NULL: none is alive */
};

extern struct window mpsd_windows[DEVICES];
extern pthread_mutex_t mpsd_windows_lock;

/* With the lock held: an allocation is gone; `keep`: its addresses go into quarantine first. */
CUresult mpsd_windows_free(struct window *window, CUdeviceptr address, bool keep);

/* With the lock held: addresses that were in quarantine long enough. */
void mpsd_windows_take_back(void);

/* With the lock held: the one for allocations that the current context makes; NULL if they are not for one. */
struct window *mpsd_windows_of(CUdevice device);

/* With the lock held: the one that an address lies in; its place in the array is the device. */
struct window *mpsd_windows_at(CUdeviceptr address);

/* With the lock held: what lies behind all that is used is guarded as far as it now reaches. False: it cannot be. */
bool mpsd_windows_tell_tail(struct window *window);

/* With the lock held: memory of another process, gone. */
void mpsd_windows_unmap_adopted(struct window *window, CUdeviceptr base);
