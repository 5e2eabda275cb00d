/* SPDX-License-Identifier: MIT */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>

struct mpsd_allocation {
	CUdeviceptr base;
	size_t size;
	CUcontext owner;
};

/* Whether the wrappers of memory.c are to be put into the table. */
bool mpsd_memory_wanted(void);

/* The allocation in a window that contains the address. False if there is none. */
bool mpsd_memory_find(CUdeviceptr address, struct mpsd_allocation *allocation);
