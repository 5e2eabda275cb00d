/* SPDX-License-Identifier: MIT */
/* The physical memory behind a piece of a window, and who may access it. */
#pragma once

#include <cuda.h>
#include <stdint.h>

#include "arena.h"

#define MPSD_DEVICES 32

/* Let `devices`, a bit for each, access what is mapped there, or no longer. */
CUresult mpsd_physical_access(struct arena_range range, uint32_t devices, CUmemAccess_flags flags);

/* Map the memory of a handle there, open to `devices`. On failure nothing is mapped. */
CUresult mpsd_physical_place(struct arena_range range, uint32_t devices, CUmemGenericAllocationHandle handle);

/*
 * Map fresh memory of `device` there, open to it and to `peers`, and have it brought to the vault. The mapping
 * alone keeps the memory: the vault's side takes the handle, or it is released. An empty range is done.
 */
CUresult mpsd_physical_map(struct arena_range range, CUdevice device, uint32_t peers);

void mpsd_physical_unmap(struct arena_range range);
