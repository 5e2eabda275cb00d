/* SPDX-License-Identifier: MIT */
/*
 * Mode `exact`: what was not proven to have ended when a context was lost is undone, and done again in the next one.
 *
 *	work_NAME() --> order --> save what it may write --> note it --> the driver        submit.c, undo.c, issue.c
 *	waits       --> let the GPU write a counter after the work --> look for it         waits.c, lanes.c
 *	all proven  --> the epoch ends: notes and saves are dropped                        epoch.c
 *	a move      --> put back what was saved, issue what was noted, in its order        replay.c
 *
 * A function of the host is an operation too (hostfunc.c), in mode `keep` as well: it runs once, in whichever copy.
 *
 * A lane is a stream with a word in pinned memory: the GPU writes there how many of the stream's operations are
 * behind it. Nothing else proves that work has ended: the return code of a wait in a context that dies does not.
 *
 * What cannot be undone or done again does not stop the program: the epoch is `unsure`, with the reason, and a move
 * in it keeps memory alone and says so, like mode `keep`.
 */
#pragma once

#include <cuda.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "arena.h"
#include "failover/carry.h"

#define MPSD_LANES 256

extern atomic_bool mpsd_exact_on;

static inline bool mpsd_exact(void)
{
	return __builtin_expect(atomic_load_explicit(&mpsd_exact_on, memory_order_relaxed), 1);
}

/* Whether what is submitted is noted: in any mode what is captured, and what may lead to a variable elsewhere. */
extern atomic_uint mpsd_captures;

static inline bool mpsd_notes(void)
{
	return mpsd_exact() || __builtin_expect(atomic_load_explicit(&mpsd_captures, memory_order_relaxed) != 0, 0) ||
	       __builtin_expect(mpsd_thread.noted_in != 0, 0) || (mpsd_knows_variables() && mpsd_tables()->moves);
}

/* Before the program has a context: it wishes to be exact. */
void mpsd_exact_start(void);

/* From now on what is in flight in a move is lost. Any thread's; `why` stays valid. */
void mpsd_exact_stop(const char *why);

/* The same, for what the program does; the daemon hears of it. */
void mpsd_exact_fail(const char *why);

/* For carry.c. What each returns is a result of the driver's, or MPSD_AGAIN. */

enum mpsd_wait {
	MPSD_WAIT_ALL,
	MPSD_WAIT_STREAM,
	MPSD_WAIT_EVENT,
	MPSD_WAIT_COPY,		/* in the legacy stream, made by the call itself */
};

/* What the GPU has to have written before a wait may say so. */
struct mpsd_proof {
	uint64_t began_ns;	/* the driver waits for it from then on; 0: it does not */
	bool is_by_graph;	/* of an event that a graph records: the driver's word is all there is */
	unsigned int count;
	struct {
		unsigned int lane;
		uint64_t number;
	} wanted[MPSD_LANES];
};

/* Around a wait, or a look, that is about to say, or has said, that work has ended. */
CUresult mpsd_exact_before(struct mpsd_proof *proof, enum mpsd_wait wait, const void *handle, bool is_look);
/* A copy that the program may read when this returns, which holds nobody in the driver. */
CUresult mpsd_stage_out(void *to, CUdeviceptr from, size_t size, CUstream stream);

CUresult mpsd_exact_after(struct mpsd_proof *proof, enum mpsd_wait wait);

/* Whether the GPU has said that all in that stream has ended. False where it is not known. */
bool mpsd_exact_has_ended(CUstream stream);

/* What is to be proven is marked, and nobody waits. */
CUresult mpsd_exact_mark(struct mpsd_proof *proof, enum mpsd_wait wait, const void *handle);

/* Later: whether the GPU has come so far. */
bool mpsd_exact_is_reached(const struct mpsd_proof *proof);

/* All work has provably ended: before something that it may use is taken away, and what is known of that forgotten. */
CUresult mpsd_exact_settle(void);
CUresult mpsd_exact_settle_stream(CUstream stream);
CUresult mpsd_exact_settle_event(CUevent event);

/*
 * A call that takes away what work may use: in mode `exact` all of that has provably ended before it, and nobody submits
 * anything before it is over.
 */
CUresult mpsd_exact_without_work(CUresult (*call)(const void *with), const void *with);

/* The same where nothing is in flight, and only then. Whether it was called. */
bool mpsd_exact_at_rest(CUresult (*call)(const void *with), const void *with);

/* What kernels may write has become more, or less, without an allocation. */
void mpsd_undo_runs_changed(void);

/* Without any lock of these: what was mapped there goes. */
void mpsd_still_gone(CUdeviceptr address);

/*
 * An allocation: its bytes, its number among those for which others were asked (0: they were not), and how often it
 * was tried.
 */
struct mpsd_shortage {
	uint64_t bytes, number;
	unsigned int tries;
};

/* After it: whether it is to be tried again, for there is more room than there was. */
bool mpsd_exact_has_more_room(CUresult *result, struct mpsd_shortage *shortage);

/* A launch of it has come: what is known of it is on its way from the processor's far memory. */
void mpsd_params_fetch(CUfunction function);

/* After the last try of a call that submits. */
static inline void mpsd_exact_given(void)
{
	mpsd_thread.noted_in = 0;
}

/* For the mover */

struct mpsd_replayed {
	uint64_t bytes, operations;
	const char *unsure;	/* NULL: nothing is missing */
};

/* While calls are held: whether what the driver calls ended has, by the GPU's own word. NOT_READY: not yet. */
CUresult mpsd_exact_prove(void);

/* What was left to the relay, whose calls are held too, the mover gives itself; as far as nobody has the order. */
void mpsd_exact_give_left(void);

/* The context came to rest, and is well. */
void mpsd_exact_rested(void);

/*
 * In a move, before the fence: whether all that may be in flight is known, and nothing of it is a copy from the host, or
 * much within the GPU. Then nothing more is given to the copy that is about to be left.
 */
bool mpsd_exact_close(void);

/*
 * The same before a fence that is to be ahead (fence.h): whether what is in flight may be done again so, as far as is known.
 * `may_be_told` is of the same look at it: whether the end of kernels will be its end.
 */
bool mpsd_exact_go_ahead(bool *may_be_told);

/* The copy is not left after all: what the program does next is given to it. Without the locks of the move. */
void mpsd_exact_stay(void);

/*
 * Of pieces in the order of their addresses: behind the others those that are room for what memory was before the epoch,
 * where that is certain. Nothing of the program's comes there: the old context's saves do, and as far as is known
 * those have ended. How many are not of that kind.
 */
unsigned int mpsd_exact_room_last(struct arena_range *pieces, unsigned int count);

/* Behind a fence: a context that was left may still write to that room. It is not used again, and nothing is done again by it. */
void mpsd_exact_lose_room(void);

/* The same where it has nothing in flight at all, by the GPU's own word, and nobody is about to give it something. */
bool mpsd_exact_is_over(void);

/* Behind the fence, before the next call: whether anything is to be undone and done again, how much, and what it takes. */
bool mpsd_exact_is_due(uint64_t *operations, uint64_t *takes_ns);

/* When a kernel was launched, not by a graph, that never had been before: CLOCK_MONOTONIC; 0: none was, as far as is known. */
uint64_t mpsd_exact_newest_ns(void);

/*
 * After that call: the epoch in which it is done again, and whether all of it has ended, whatever was given since.
 * LAUNCH_FAILED and the like: the context is lost.
 */
uint64_t mpsd_exact_epoch(void);
CUresult mpsd_exact_look(uint64_t epoch);

/* In the copy that comes into use, behind the fence. `may`: what is noted may be done again. */
void mpsd_exact_move(bool may, struct mpsd_replayed *replayed);

/* In a move of mode `keep`: functions of the host that have not begun will not. */
void mpsd_hosts_lose(void);

/* The copy after so many moves is no more. */
void mpsd_hosts_copy_went(uint64_t moves);

/* At the program's end: what was validated is told, if that `is_on`. */
void mpsd_exact_at_end(bool is_on);

void mpsd_exact_child(void);
void mpsd_hosts_child(void);
