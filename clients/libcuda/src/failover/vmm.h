/* SPDX-License-Identifier: MIT */
/* Memory that the program makes and maps itself (cuMemCreate, cuMemMap), in addresses of a window. */
#pragma once

#include <cuda.h>
#include <stdbool.h>

#define MPSD_MOST_ACCESSES 8

struct mpsd_mapped {
	int fd;				/* of its memory, which stays ours */
	unsigned int accesses;
	CUmemAccessDesc access[MPSD_MOST_ACCESSES];
};

/* With the lock of the windows: what is mapped from there on. False: nothing of that kind. */
bool mpsd_vmm_find(CUdeviceptr base, struct mpsd_mapped *mapped);

/* Takes that lock: by which handles the program wants what is mapped there to be shared; untouched where nothing is. */
void mpsd_vmm_handle_types(CUdeviceptr address, unsigned long long *types);

/*
 * In a move, with the same lock: the handles that the copy in use has of it, each as often as it is to be released there; the
 * next copy has its own. To be freed.
 */
CUmemGenericAllocationHandle *mpsd_vmm_take(size_t *count);

/* In a forked child, which has none of it. */
void mpsd_vmm_child(void);
