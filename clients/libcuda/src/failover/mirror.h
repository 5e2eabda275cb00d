/* SPDX-License-Identifier: MIT */
/*
 * The memory of the windows, mapped at the same addresses in the standby's copy of the driver. All under the
 * lock of the windows.
 */
#pragma once

#include <cuda.h>
#include <stdbool.h>

#include "arena.h"
#include "failover/vmm.h"

/* Of what there is, and of what comes from now on. False: `why` not. */
bool mpsd_mirror_begin(const char **why);

/* A descriptor of all that there is, and of what comes, for a standby that is made when it is needed. */
bool mpsd_mirror_keep(const char **why);

/* Nothing more is kept so. */
void mpsd_mirror_keep_end(void);

/* No standby any more. With `unmap` its mappings go; otherwise they are in use now, or its copy has ended. */
void mpsd_mirror_end(bool unmap);

/* What could not be mirrored since; NULL: nothing. */
const char *mpsd_mirror_fault(void);

/* From memory.c and physical.c */
void mpsd_mirror_window(CUdevice device, CUdeviceptr base, size_t size);
void mpsd_mirror_born(struct arena_range range, CUdevice device, CUmemGenericAllocationHandle handle);
void mpsd_mirror_gone(struct arena_range range);

/* From vmm.c */
void mpsd_mirror_mapped(struct arena_range range, CUdevice device, const struct mpsd_mapped *mapped);
void mpsd_mirror_access(struct arena_range range, CUdevice device, const CUmemAccessDesc *access, size_t count);
