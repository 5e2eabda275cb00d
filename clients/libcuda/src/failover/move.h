/* SPDX-License-Identifier: MIT */
/* The standby, from its making to the moment at which the program goes on there. */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

#include "exact/exact.h"

struct mpsd_times {
	uint64_t held_ns, fence_ns, on_ns;	/* CLOCK_MONOTONIC */
	struct mpsd_replayed replayed;		/* `unsure` too where the mode is not `exact` */
};

/* All for the thread of line.c, but where it says otherwise. */

/* Load a copy from `folder`, and make a context in the domain of `pipe`. False: `why` says why not. */
bool mpsd_standby_open(uint64_t generation, const char *pipe, const char *folder, const char **why);

/* What the program has made since. False: the standby is of no use. */
bool mpsd_standby_follow(const char **why);

void mpsd_standby_close(void);

/*
 * Hold all calls, end what the old context may write, and go on in the standby. `planned`: that context is well.
 * `again`: what was in flight may be done again.
 */
bool mpsd_move(bool planned, bool again, struct mpsd_times *times, const char **why);

/* After a move: the copy that was left is unloaded once nobody is inside it, which is waited for. */
void mpsd_standby_end_left(void);

/* The calling thread's context, in the copy in use; `is_first`: it has not called since the first move. */
void mpsd_move_thread(bool is_first);

/* phase.c */
void mpsd_phase_begin(void);
void mpsd_phase_end(bool moved);
void mpsd_phase_wake(void);
void mpsd_phase_child(void);
