/* SPDX-License-Identifier: MIT */
/* Copies of the driver's library beside the first one. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proxy.h"

#define MPSD_COPY_NUMBERS 3

struct mpsd_copy {
	void *handle;
	unsigned int number;	/* 0: the program's first one */
	char path[512];
	void *calls[MPSD_SLOTS];
};

/*
 * Load one of the copies in `folder` that is not loaded, and keep its bind() and getenv() from the first one's.
 * False: `why` says why not.
 */
bool mpsd_copy_load(struct mpsd_copy *copy, const char *folder, const char **why);

/* Lead the ioctl() of the program's first one as that of the others is led. Once, any time. */
void mpsd_copy_watch_first(void);

/* Nothing of it may be called any more. */
void mpsd_copy_unload(struct mpsd_copy *copy);

/* How often each was unloaded: its code is gone for a thread that came into a call before. */
extern atomic_uint mpsd_copy_ends[MPSD_COPY_NUMBERS];

/*
 * What the copy reserves on this thread is to lie there, over what the process has there already; size 0: no
 * more. Nothing is mapped or unmapped for it meanwhile.
 */
void mpsd_copy_place(uint64_t base, size_t size);

/* What getenv("CUDA_MPS_PIPE_DIRECTORY") says to a copy, on this thread; NULL: as to the program. */
void mpsd_copy_pipe(const char *directory, uint64_t number);
