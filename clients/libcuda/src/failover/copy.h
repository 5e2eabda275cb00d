/* SPDX-License-Identifier: MIT */
/* Copies of the driver's library beside the first one. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "proxy.h"

#define MPSD_COPY_NUMBERS 4

struct mpsd_copy {
	void *handle;
	unsigned int number;	/* 0: the program's first one */
	char path[512];
	const void *code;	/* somewhere in what is loaded */
	void *calls[MPSD_SLOTS];
};

/*
 * Load one of the copies in `folder` that is not loaded, and keep its bind() and getenv() from the first one's.
 * False: `why` says why not.
 */
bool mpsd_copy_load(struct mpsd_copy *copy, const char *folder, const char **why);

/* Lead the ioctl() of the program's first one as that of the others is led. Before its cuInit(); once. */
void mpsd_copy_watch_first(void);

/* Nothing of it may be called any more. */
void mpsd_copy_unload(struct mpsd_copy *copy);

/* How often each was unloaded. */
extern atomic_uint mpsd_copy_ends[MPSD_COPY_NUMBERS];

/*
 * For a thread of the driver's, in a call that it began when the copy had been unloaded so often: there may be no code
 * any more to come back to, so it ends here. Its stack is lost; nobody waits for its end.
 */
static inline void mpsd_copy_come_back(unsigned int number, unsigned int ends)
{
	if (__builtin_expect(atomic_load(&mpsd_copy_ends[number]) != ends, 0))
		syscall(SYS_exit, 0);
}

/*
 * What the copy reserves on this thread is to lie there, over what the process has there already; size 0: no
 * more. Nothing is mapped or unmapped for it meanwhile.
 */
void mpsd_copy_place(uint64_t base, size_t size);

/* What getenv("CUDA_MPS_PIPE_DIRECTORY") says to a copy, on this thread; NULL: as to the program. */
void mpsd_copy_pipe(const char *directory, uint64_t number);
