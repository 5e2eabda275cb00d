/* SPDX-License-Identifier: MIT */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>

struct mpsd_allocation {
	CUdeviceptr base;
	size_t size;
	CUcontext owner;
	CUdevice device;
	CUdeviceptr piece;	/* what is mapped as one around it: a slab, or it alone */
	size_t piece_size;
	bool is_imported;	/* memory of another process (ipc.c), and not to be freed here */
};

/* Whether the wrappers of memory.c are to be put into the table. */
bool mpsd_memory_wanted(void);

/* The allocation in a window that contains the address. False if there is none. */
bool mpsd_memory_find(CUdeviceptr address, struct mpsd_allocation *allocation);

/* Whether the address lies in a window, where there is an allocation or not. */
bool mpsd_memory_is_in_window(CUdeviceptr address);

/* bounds.c: whether the driver would refuse a copy of so much of it, for it ends sooner. */
bool mpsd_bounds_refuse(CUdeviceptr address, size_t size);

enum mpsd_inside {
	MPSD_INSIDE_OR_NOT,
	MPSD_INSIDE_FIRST,	/* where there is no memory for a window there is none, though the driver may have a little elsewhere */
	MPSD_INSIDE_ONLY,	/* nor where the window has no addresses */
};

/* cuMemAlloc so. */
CUresult mpsd_memory_alloc_inside(CUdeviceptr *dptr, size_t size, enum mpsd_inside inside);

/* pitch.c: cuMemAllocPitch by that function, in place of cuMemAlloc. */
CUresult mpsd_memory_alloc_rows(CUresult (*alloc)(CUdeviceptr *dptr, size_t size), CUdeviceptr *dptr, size_t *pPitch,
				size_t WidthInBytes, size_t Height, unsigned int ElementSizeBytes);

/*
 * Map memory of another process in the window of the current context, which must be the primary one of
 * `device`: CUDA_ERROR_NOT_SUPPORTED where that has none. `size`: a multiple of the granule.
 */
CUresult mpsd_memory_adopt(CUdevice device, size_t size, CUmemGenericAllocationHandle handle,
			   CUdeviceptr *base);
void mpsd_memory_disown(CUdeviceptr base);

/* What was freed during a capture that is over. Whether there was any. In mode `exact` with the order. */
bool mpsd_memory_free_put_off(void);

/* Until the work of that context has ended. */
CUresult mpsd_memory_wait(CUcontext owner);

/* Whether `context` is a primary one whose allocations come into a window; `device` is whose. */
bool mpsd_memory_is_primary(CUcontext context, CUdevice *device);

/* What is, and will be, mapped in the window of `home` may be accessed by `peer` too, or no longer. */
CUresult mpsd_memory_set_peer(CUdevice home, CUdevice peer, bool on);

/* A primary context is there; one of its references was given up, or all were. */
void mpsd_memory_begin(CUdevice dev, CUcontext primary);
void mpsd_memory_end(CUdevice dev);
