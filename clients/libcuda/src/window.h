/* SPDX-License-Identifier: MIT */
/* The addresses that a window of memory.c gets. */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "span.h"

/*
 * Reserve the addresses of a device's window, where window_base and window_bytes in MPSD_DEBUG want them if
 * that can be; what could not be is said, and in the statistics. `zone` bytes are wanted on each side of a
 * piece. `lead`: how many are wanted before and behind all pieces; then, how many lie between `base` and where
 * the first piece may begin. False: there is no window.
 */
bool mpsd_window_reserve(CUdevice device, size_t zone, size_t *lead, CUdeviceptr *base, size_t *size);

/*
 * Whether this is a forked child: it has no driver, and may have inherited locks as other threads of its
 * parent had them, so it takes none.
 */
bool mpsd_window_is_lost(void);

/* Around all windows. */
extern struct mpsd_span mpsd_windows_span;

/* Whether some of it lies in a window. Takes no lock. */
bool mpsd_window_covers(uint64_t address, size_t size);

/* It could not be used. */
void mpsd_window_give_up(CUdevice device, CUdeviceptr base, size_t size);

/* The physical memory that is mapped there: exportable, and otherwise as much like cuMemAlloc's as can be. */
CUmemAllocationProp mpsd_window_property(CUdevice device);
