/* SPDX-License-Identifier: MIT */
/* The standby, from its making to the moment at which the program goes on there. */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

#include "exact/exact.h"
#include "failoverwire.h"

struct mpsd_times {
	uint64_t held_ns, fence_ns, on_ns;	/* CLOCK_MONOTONIC */
	struct mpsd_replayed replayed;		/* `unsure` too where the mode is not `exact` */
	uint64_t waits;				/* not 0: calls are held until mpsd_turn(); as MOVED has it */
	enum mpsd_failover_whose whose;		/* the exception from which it was moved */
	uint64_t takes_ns;			/* what is done again then, as far as is known; 0: it is not */
};

/* All for the thread of line.c, but where it says otherwise. */

/*
 * Load a copy from `folder`, and make a context in the domain of `pipe`; a lazy one is made when it is to come. False:
 * `why` says why not.
 */
bool mpsd_standby_offer(uint64_t generation, const char *pipe, const char *folder, const char **why);
bool mpsd_standby_come(const char **why);

/* Whether standbys are lazy, by the daemon's word, where the environment says nothing. Asked by any thread. */
void mpsd_standby_lazy(bool is);
bool mpsd_standby_is_lazy(void);

/* What the program has made since. False: the standby is of no use. */
bool mpsd_standby_follow(const char **why);

void mpsd_standby_close(void);

/* For the move: its library; its calls are nobody's any more; it is what is in use, and what was so has been left. */
void *mpsd_standby_handle(void);
void mpsd_standby_no_calls(void);
void mpsd_standby_used(void);

/* The copy in use is about to be left, or is not after all. */
void mpsd_standby_leave(bool is);
unsigned int mpsd_in_use_number(void);

/* Until what was left is due to be unloaded; -1: there is nothing. */
int mpsd_left_ms(void);

/* Which copies were left and are there still, the first one among them for good; how often that has changed. By their thread. */
unsigned int mpsd_left_numbers(unsigned int *numbers);	/* MPSD_COPY_NUMBERS at most */
unsigned int mpsd_left_changes(void);

struct mpsd_move_order {
	bool planned;			/* the old context is well */
	enum mpsd_failover_again again;	/* IN_TURN, AT_ONCE: what was in flight may wait, if there is anything */
	bool was_logged, hurries;	/* as blame.h has them */
};

/* Hold all calls, end what the old context may write, and go on in the standby. */
bool mpsd_move(const struct mpsd_move_order *order, struct mpsd_times *times, const char **why);

/* rest.c. NOT_READY: not in time. What a loss says: the context is not well any more, and its work is lost. */
CUresult mpsd_come_to_rest(void);

/* After a move that waits: what was in flight is done again (`may`) or lost, and calls go on, uncovered as yet. */
void mpsd_turn(bool may, struct mpsd_replayed *replayed);
void mpsd_cover_again(void);		/* by zones, if it is not */
bool mpsd_cover_step(void);		/* some of that. False: nothing is left to be covered */
bool mpsd_turn_is_due(void);
int mpsd_turn_left_ms(void);		/* until it gives up; -1: it does not wait */

/*
 * again.c: the same, seen to its end or until the daemon says something on `line`, told there as of the generation
 * `home`, and then covered. False: that cannot be told.
 */
bool mpsd_turn_have(bool may, int line, uint64_t home);

/* There is no daemon that would say so; or none just now: what waits for its turn goes on waiting. */
void mpsd_turn_forgo(void);
void mpsd_turn_cut_off(void);

/* What was done again in the last turn had not ended when that was told, or has since: that is told now. False: it cannot be. */
bool mpsd_turn_follow(int line);
bool mpsd_turn_runs_on(void);

/* After a move: the copy that was left is unloaded, once that is due and nobody is inside it. Nothing is waited for. */
void mpsd_standby_tend(void);

/* That, and behind the fence what it left to a thread. */
void mpsd_move_tend(void);

/* Until something of that is due, or mpsd_turn_left_ms() is; -1: nothing will be. */
int mpsd_due_ms(void);

/* The calling thread's context, in the copy in use; `is_first`: it has not called since the first move. */
void mpsd_move_thread(bool is_first);

/* phase.c */
void mpsd_phase_begin(void);
void mpsd_phase_end(bool moved);
void mpsd_phase_wake(void);
void mpsd_phase_child(void);
