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

/* With the lock held: memory of another process, gone. */
void mpsd_windows_unmap_adopted(struct window *window, CUdeviceptr base);
