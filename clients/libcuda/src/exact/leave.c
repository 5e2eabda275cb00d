// SPDX-License-Identifier: MIT
#include "exact/leave.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>

#include "capture.h"
#include "clock.h"
#include "exact/chunks.h"
#include "exact/limit.h"
#include "exact/state.h"
#include "exact/undo.h"
#include "exact/validate.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "failover/made.h"
#include "stats.h"
#include "thread.h"

#define FIRST_PAUSE_MS 1
#define LAST_PAUSE_MS 64
#define END_MS 500

static struct mpsd_leaving leaving;
static atomic_bool has_left, is_ordered;
static atomic_bool is_exact;	/* it left mode exact, whose epochs tell when a buffer is unused */

bool mpsd_leave_has(void)
{
	return atomic_load(&has_left);
}

const struct mpsd_leaving *mpsd_leave_why(void)
{
	return &leaving;
}

/*
 * Nothing is in flight, so nothing is lost. A thread that has passed the check of the mode already finds the epoch unsure and
 * saves nothing.
 */
void mpsd_leave(const struct mpsd_leaving *why)
{
	if (atomic_load(&has_left) || !mpsd_exact() || mpsd_validates() || mpsd_is_left() || atomic_load(&mpsd_moves) & 1 ||
	    !mpsd_lanes_all_proven())
		return;
	leaving = *why;
	mpsd_stats->left_budget = (uint64_t)why->budget;
	atomic_store(&mpsd_exact_on, false);
	__atomic_store_n(&mpsd_epoch.unsure, "the program has left fail-over", __ATOMIC_RELAXED);
	atomic_store(&is_exact, true);
	atomic_store(&has_left, true);
	mpsd_carry_plainly();
	mpsd_release_begin();
	mpsd_line_wake();
}

/* By order */

void mpsd_leave_end(void)
{
	if (atomic_load(&is_ordered))
		mpsd_leave(&(struct mpsd_leaving){ .budget = MPSD_FAILOVER_BUDGET_BY_HAND });
}

/* In mode keep nothing is saved, and no move runs: this thread makes them. */
static void leave_plainly(void)
{
	if (atomic_load(&has_left))
		return;
	leaving = (struct mpsd_leaving){ .budget = MPSD_FAILOVER_BUDGET_BY_HAND };
	mpsd_stats->left_budget = MPSD_FAILOVER_BUDGET_BY_HAND;
	atomic_store(&has_left, true);
}

void mpsd_leave_follow(void)
{
	if (!atomic_load(&is_ordered) || atomic_load(&has_left))
		return;
	mpsd_word_take(&mpsd_exact_lock);
	/* An epoch with operations, or into which one is about to come, has an end at which the program leaves. */
	if (!mpsd_exact())
		leave_plainly();
	else if (!mpsd_epoch.operations && !mpsd_epoch.is_awaited && !mpsd_epoch.is_closed)
		mpsd_leave_end();
	mpsd_word_give(&mpsd_exact_lock);
}

void mpsd_leave_order(void)
{
	atomic_store(&is_ordered, true);
	mpsd_leave_follow();
}

#define MIB(bytes) (((bytes) + (1u << 20) - 1) >> 20)

void mpsd_leave_text(char *text, size_t room)
{
	const uint64_t *values = leaving.values;
	uint64_t percent = values[0] * 100 / (values[1] ? values[1] : 1);

	if (leaving.budget == MPSD_FAILOVER_BUDGET_BY_HAND)
		snprintf(text, room, "switched off by hand");
	else if (leaving.budget == MPSD_FAILOVER_BUDGET_TIME)
		snprintf(text, room, "saving slows the program by %" PRIu64 " %%; the budget is %" PRIu64 ".%" PRIu64 " %%",
			 percent, values[2] / 10, values[2] % 10);
	else
		snprintf(text, room, "one operation needs %" PRIu64 " MiB of snapshot buffers; the limit is %" PRIu64 " MiB",
			 MIB(values[0]), values[1] >> 20);
}

/* Releasing */

static atomic_bool is_on, is_over;

static uint64_t most(void)
{
	uint64_t limit = mpsd_limit(), needed = mpsd_chunks_needed();

	return atomic_load(&has_left) ? 0 : needed < limit ? needed : limit;
}

/* Enter like a call of the program: a move may come between. */
static CUresult release_some(void)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	uint64_t moves = mpsd_carry_enter();
	CUresult result;

	/* In this mode the thread cannot invalidate a capture that the program begins meanwhile. */
	real_cuThreadExchangeStreamCaptureMode(&mode);
	result = mpsd_enter_context();
	if (result == CUDA_SUCCESS && !mpsd_capture_active() && !mpsd_capturing())
		result = mpsd_undo_release(most());
	mpsd_carry_leave(moves);
	return result;
}

/* If the mode has ended for another reason, epochs end no more, and nothing tells when a buffer is unused. */
static bool is_beyond(void)
{
	return mpsd_undo_bytes() > most() && (mpsd_exact() || atomic_load(&is_exact));
}

static void *release(void *unused)
{
	int pause_ms = FIRST_PAUSE_MS;

	(void)unused;
	do {
		while (is_beyond() && !atomic_load(&is_over)) {
			/* The program meets the loss of its context itself. */
			if (mpsd_is_loss(release_some())) {
				atomic_store(&is_on, false);
				return NULL;
			}
			if (is_beyond())
				mpsd_pause(pause_ms);
			pause_ms = pause_ms < LAST_PAUSE_MS ? pause_ms * 2 : pause_ms;
		}
		atomic_store(&is_on, false);
		/* The limit may have been lowered just before. */
	} while (is_beyond() && !atomic_load(&is_over) && !atomic_exchange(&is_on, true));
	return NULL;
}

void mpsd_release_begin(void)
{
	if (!is_beyond() || atomic_load(&is_over) || atomic_exchange(&is_on, true))
		return;
	if (!mpsd_thread_start(release, NULL))
		atomic_store(&is_on, false);
}

/* The thread is not there, and nothing is released any more. */
void mpsd_release_child(void)
{
	atomic_store(&is_over, true);
	atomic_store(&is_on, false);
}

void mpsd_release_at_end(void)
{
	atomic_store(&is_over, true);
	for (int ms = 0; atomic_load(&is_on) && ms < END_MS; ms++)
		mpsd_pause(1);
}
