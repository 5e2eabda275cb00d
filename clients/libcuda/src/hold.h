/* SPDX-License-Identifier: MIT */
/* Addresses of a window in which the program maps memory itself (failover/vmm.c). */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>

#include "arena.h"
#include "memory.h"

/* As mpsd_memory_find(), and what the program has mapped around it itself, for kernels to write, without a gap. */
bool mpsd_memory_find_mapped(CUdeviceptr address, struct mpsd_allocation *allocation);

/*
 * Addresses in the window of the current context, a primary one, for the program to map something in: NOT_SUPPORTED where
 * that has none. And back: NOT_FOUND, they are none of those; INVALID_VALUE, something is mapped there.
 */
CUresult mpsd_memory_hold(size_t size, size_t alignment, CUdeviceptr *base);
CUresult mpsd_memory_let_go(CUdeviceptr base, size_t size);
bool mpsd_memory_is_held(CUdeviceptr address);

/*
 * With the lock held: in addresses that the program holds something may be mapped, is so, and is so no
 * more. map(): false, there is no memory.
 */
bool mpsd_windows_may_map(struct arena_range range);
bool mpsd_windows_map(struct arena_range range);
void mpsd_windows_unmap(struct arena_range range);

/* With the lock held: kernels may write to what is mapped there as one from now on, or no more. */
void mpsd_windows_open(struct arena_range range, bool is);

/* With the lock held: what is mapped there as one; of an address in a window. */
bool mpsd_windows_piece(CUdeviceptr address, struct arena_range *piece);
CUdevice mpsd_windows_device(CUdeviceptr address);
