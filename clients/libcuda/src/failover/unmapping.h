/* SPDX-License-Identifier: MIT */
/*
 * All memory of the windows, unmapped in the copy of the driver that is left, by a thread of its own: what fence.c begins,
 * and goes on beside the program.
 */
#pragma once

#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "failover/cut.h"

/* Of a fence that is ahead. */
enum mpsd_verdict {
	MPSD_FENCE_UNDECIDED,
	MPSD_FENCE_HOLDS,
	MPSD_FENCE_BROKEN,	/* the old copy may still write */
};

struct mpsd_unmapping {
	__typeof__(&cuMemUnmap) unmap;	/* the left copy's, and the next one */
	__typeof__(&cuMemRelease) release;
	uint64_t moves;			/* its number */
	uint64_t generation;		/* of the next one: that of the daemon's word */
	int ended;			/* eventfd */
	atomic_bool all;		/* that was tried is unmapped */
	atomic_bool is_through;		/* all was tried: what the old copy did in it came before */
	atomic_bool is_behind;		/* the old copy comes into none of the pieces any more, or all was tried */
	atomic_int holders;		/* its thread, and whoever waits for it */
	struct mpsd_cut *cut;		/* before it; NULL: there was none */
	bool goes_on;			/* that is not through: the mover has not waited for all of it */
	bool is_ahead;			/* the mover goes on before it is known that the fence holds */
	atomic_uint verdict;		/* of that one; enum mpsd_verdict */
	atomic_uint_least64_t decided_ns;	/* after that; 0: not yet */
	_Atomic(uint32_t *) gate;	/* a word that the next copy waits for until then; NULL: there is none */
	bool may_be_told;		/* the end of kernels is the end of all that may come into the rest */
	atomic_bool is_told;		/* so it was */
	bool has_heard;			/* the mover, of one that is not ahead: the word was said */
	uint64_t asked_ns;		/* when it looked last whether that tells it anything */
	pthread_mutex_t hearing;
	int line;			/* on which its thread may be told, too; with that lock; -1: it may not */
	CUmemGenericAllocationHandle *handles;	/* of the program's own memory, which lasts as long as the last one */
	size_t handle_count;
	unsigned int count, first;	/* pieces; the first ones are the program's */
	struct arena_range pieces[];
};

/* In a move, with the lock of the windows. NULL: out of host memory. The next copy is that of the generation. */
struct mpsd_unmapping *mpsd_unmapping_prepare(uint64_t generation);

/*
 * Where it goes on, its thread sees to the cut first; then all is unmapped. False: there is no thread for it. From then
 * on two hold it, and each lets it go.
 */
bool mpsd_unmapping_start(struct mpsd_unmapping *unmapping);
void mpsd_unmapping_let_go(struct mpsd_unmapping *unmapping);

/* The same without a thread. */
void mpsd_unmapping_do(struct mpsd_unmapping *unmapping);

/* Whoever knows it first says whether the fence holds; then the gate is opened, whichever of the two comes first. */
void mpsd_unmapping_decide(struct mpsd_unmapping *unmapping, enum mpsd_verdict verdict);
void mpsd_unmapping_open_gate(struct mpsd_unmapping *unmapping);

/* Whether the daemon says FENCED of that generation on the line: then, and only then, it is taken from there. */
bool mpsd_fence_is_said(int line, uint64_t generation);

/*
 * Of one that is ahead, by the mover and by its thread: the word decides it, whoever hears it. What else is said is left
 * there; when the mover is through the line is its own again.
 */
void mpsd_unmapping_hear(struct mpsd_unmapping *unmapping);
void mpsd_unmapping_hear_no_more(struct mpsd_unmapping *unmapping);

/* Whether something is being unmapped beside the program. */
bool mpsd_unmapping_lasts(void);

/* Until that has ended, or so long. Whether there was such a thing, and it has. */
bool mpsd_unmapping_await(int milliseconds);

/* In a forked child, where nobody unmaps anything. */
void mpsd_unmapping_child(void);
