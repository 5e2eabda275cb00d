/* SPDX-License-Identifier: MIT */
/* Copies of pages within the GPU, given to it as few operations; and how such a kernel is made. */
#pragma once

#include "exact/state.h"

/*
 * With the order: a kernel of this library's, once. Made as the program's functions are, so that the standby has it too; one
 * that a move has overtaken is not noted.
 */
CUresult mpsd_own_kernel(CUfunction *function, const char *image, const char *name);

struct mpsd_saved {
	CUdeviceptr to, from;
	uint64_t size;		/* whole pages */
	bool is_mapped;		/* else the driver is to look, and to refuse */
};

#define MPSD_SAVED_AT_ONCE 16u

/* With the order, so many at most, into that stream of the copy of this call. */
CUresult mpsd_saver_copy(const struct mpsd_saved *saved, unsigned int count, CUstream stream);

/* The same in a move, where nothing is loaded for it. */
CUresult mpsd_saver_put_back(const struct mpsd_saved *saved, unsigned int count, CUstream stream);
