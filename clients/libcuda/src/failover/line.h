/* SPDX-License-Identifier: MIT */
/* The thread that talks with the daemon about a standby (failoverwire.h), and makes it. */
#pragma once

#include <cuda.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "failoverwire.h"

/* Whether the environment names a daemon that offers it (MPSD_FAILOVER_SOCKET). */
bool mpsd_line_offered(void);

struct mpsd_times;

/* The program has a context. Only the first call does something. */
void mpsd_line_start(void);

/* A copy of the driver was loaded or started: the process's end waits for this thread before it comes to that. */
void mpsd_line_ends_first(void);

/* Something was made that the standby lacks. */
void mpsd_line_wake(void);

/* Whether a move may come: there is a whole standby, and nothing that could not come along. */
bool mpsd_line_ready(void);

/*
 * How long, in ms, an error of the program's own is kept from it, while it may still be moved: with a standby, or where
 * the next one is on its way after a move (whose work it was that faulted may show when it is done again). 0: not at all.
 */
int mpsd_line_word_ms(void);

/* The daemon has said that no standby comes any more: it made the fault, or stayed. */
bool mpsd_line_is_behind(void);

/* The standby is being moved into: after the move has begun, so that nobody sees neither. */
void mpsd_line_moves(void);

/* tell.c, for the thread. What was told before is not told again. False: the connection has ended. */
struct mpsd_told {
	unsigned int opaque, unsure;
};

struct mpsd_failover_message mpsd_line_message(enum mpsd_failover_kind kind, uint64_t generation, const char *text);
bool mpsd_line_say(int line, const struct mpsd_failover_message *message);
bool mpsd_line_tell_ready(int line, uint64_t generation, uint64_t took_ns);
bool mpsd_line_tell_unready(int line, uint64_t generation, const char *why, bool for_memory);
bool mpsd_line_tell_moved(int line, uint64_t generation, const struct mpsd_times *times, uint64_t began, bool goes_on);
bool mpsd_line_tell(int line, uint64_t generation, struct mpsd_told *told);
bool mpsd_line_tell_error(int line, uint64_t generation);

/* Where pages are of copies that were left, if that has changed; `may_wait`: later, while others wait for this thread. */
bool mpsd_left_tell(bool may_wait);
void mpsd_left_may_tell(int line);	/* the daemon takes that there; -1: it does not */

/* The program has met the loss of its context, the one after so many `moves`. */
void mpsd_line_error(CUresult result, uint64_t moves);

/* The daemon has not moved it: from now on its errors are its own. */
void mpsd_line_give_up(void);

/*
 * The program uses what cannot come along; `what` stays valid. Each is told once. A move that has not come about by
 * then does not; where the copy was left, mpsd_is_left() says so from now on.
 */
void mpsd_line_opaque(const char *what);

/*
 * After a call: where it succeeded, what it made cannot come along. AGAIN where the copy was left meanwhile: nothing
 * came of it there, and nothing is noted, for the call comes again.
 */
CUresult mpsd_line_made(CUresult result, const char *what);

/* mpsd_line_opaque() in two: with a lock (whether it is new), and what of a new one is to be done without. */
bool mpsd_opaque_note(const char *what);
void mpsd_opaque_noted(const char *what);

/*
 * For the move: from the one to the other nothing is noted. Whether nothing was before. In between it takes locks of
 * capture.c, zones.c and records.c: who has one of them notes nothing.
 */
bool mpsd_opaque_begin(void);
void mpsd_opaque_end(void);
void mpsd_opaque_child(void);

/* It did what cannot be undone or done again: where that was in flight in a move, it is lost. */
void mpsd_line_unsure(const char *what);

/* For the thread: an error to be said (0: none), and that the next one is another context's. */
uint64_t mpsd_own_error_take(void);
bool mpsd_own_error_met(void);
void mpsd_own_error_forget(void);

/* For the thread: what was told so, in its order. */
#define MPSD_MOST_NOTES 16
struct mpsd_notes {
	_Atomic(const char *) names[MPSD_MOST_NOTES];
	atomic_uint count;
};

/* The one after so many, which is one more then; NULL: there is none, or it is just being written. */
const char *mpsd_notes_next(struct mpsd_notes *notes, unsigned int *told);
struct mpsd_notes *mpsd_opaque_notes(void);
struct mpsd_notes *mpsd_unsure_notes(void);
