/* SPDX-License-Identifier: MIT */
/* Copies of pages within the GPU, given to it as few operations; and how such a kernel is made. */
#pragma once

#include "exact/state.h"

/*
 * With the order: a kernel of this library's, once. Made as the program's functions are, so that the standby has it too; one
 * that a move has overtaken is not noted.
 */
CUresult mpsd_own_kernel(CUfunction *function, const char *image, const char *name);

/* The same where there may be none: NULL. It was refused for good, or is not there while something is captured. */
struct mpsd_own {
	CUfunction function;	/* the mover looks at it, too */
	bool is_refused;
};

CUfunction mpsd_own_if_any(struct mpsd_own *own, const char *image, const char *name);

struct mpsd_saved {
	CUdeviceptr to, from;
	uint64_t size;		/* whole pages */
	bool is_mapped;		/* else the driver is to look, and to refuse */
};

#define MPSD_SAVED_AT_ONCE 16u

/* What the kernel writes there once all is copied. Those in one stream have the same `counter`, and others another. */
struct mpsd_saver_mark {
	uint32_t *word;
	uint32_t number;
	unsigned int counter;	/* below MPSD_LANES */
	bool is_made;		/* it does; else there is no kernel that would */
};

/* With the order, so many at most, into that stream of the copy of this call. NULL: nothing is to be written. */
CUresult mpsd_saver_copy(const struct mpsd_saved *saved, unsigned int count, CUstream stream, struct mpsd_saver_mark *mark);

/* The same in a move, where nothing is loaded for it. */
CUresult mpsd_saver_put_back(const struct mpsd_saved *saved, unsigned int count, CUstream stream);
