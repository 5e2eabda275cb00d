// SPDX-License-Identifier: MIT
/* The move into the standby's copy of the driver. */
#include "failover/move.h"

#include <pthread.h>
#include <stdlib.h>

#include "capture.h"
#include "clock.h"
#include "failover/autopsy.h"
#include "failover/blame.h"
#include "failover/carry.h"
#include "failover/copy.h"
#include "failover/fence.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "failover/made.h"
#include "failover/mirror.h"
#include "launches.h"
#include "turn.h"
#include "windows.h"
#include "zones.h"

#define LOOK_MS 5		/* what was done again and runs on is looked at so often */
#define TURN_MS 11000		/* less than a held call waits */

/* Of each copy that comes into use. Kept for good: a thread may be inside one at any time. */
static struct own_tables {
	struct mpsd_tables tables;
	void *real[MPSD_SLOTS], *inner[MPSD_SLOTS];
	struct own_tables *older;
} *next, *newest;

static CUresult no_function(void)
{
	return CUDA_ERROR_NOT_FOUND;
}

/* Answers with pointers into the driver: those into the first copy are known, and it stays. */
static bool is_the_firsts(unsigned int index)
{
	return index == MPSD_cuGetProcAddress || index == MPSD_cuGetProcAddress_v2 || index == MPSD_cuGetExportTable;
}

/* The copy in use is the standby now. With the locks of made.h and of the windows. */
static void switch_over(void)
{
	for (unsigned int i = 0; i < MPSD_SLOTS; i++) {
		next->real[i] = is_the_firsts(i) ? mpsd_real[i] : mpsd_other[i] ? mpsd_other[i] : (void *)no_function;
		next->inner[i] = mpsd_inner[i] == mpsd_real[i] ? next->real[i] : mpsd_inner[i];
	}
	next->tables = (struct mpsd_tables){ next->real, next->inner, mpsd_moves_done() + 2 };
	mpsd_capture_copy(next->tables.moves);
	atomic_store(&mpsd_tables_now, &next->tables);
	next->older = newest;
	newest = next;
	next = NULL;
	for (int i = 0; i < DEVICES; i++) {
		struct mpsd_made *context = mpsd_windows[i].primary ? mpsd_made_context(i) : NULL;

		if (!context)
			continue;
		mpsd_launches_no_context(mpsd_windows[i].primary);
		mpsd_windows[i].primary = context->twin;
		mpsd_launches_context(context->twin);
	}
	__atomic_store_n(&mpsd_real_handle, mpsd_standby_handle(), __ATOMIC_RELEASE);
	mpsd_made_move();
	mpsd_mirror_end(false);
	mpsd_zones_copy(MPSD_RANGE_COPY_TAKES_OVER);
	mpsd_standby_no_calls();
}

static bool hold_and_switch(bool *planned, bool may_go_ahead, struct mpsd_times *times, const char **why)
{
	CUresult rest = CUDA_SUCCESS;
	bool is, turn;

	times->held_ns = mpsd_now_ns();
	if (!mpsd_standby_come(why) || !mpsd_standby_follow(why))
		return false;
	*why = "out of host memory";
	if (!next && !(next = calloc(1, sizeof(*next))))
		return false;
	*why = "its work did not end in time";
	if (*planned)
		rest = mpsd_come_to_rest();
	if (rest == CUDA_ERROR_NOT_READY)
		return false;
	*planned = *planned && rest == CUDA_SUCCESS;
	pthread_mutex_lock(&mpsd_windows_lock);
	mpsd_made_lock();
	/* What was made since is there too: nobody makes anything while a move is on. */
	is = !mpsd_made_waits() && !mpsd_mirror_fault();
	*why = is ? MPSD_STILL_WRITES : "an object was created during the fail-over";
	turn = mpsd_turn_take();
	if (!mpsd_opaque_begin()) {
		is = false;
		*why = "an object that fail-over cannot preserve was created meanwhile";
	}
	is = is && mpsd_fence(may_go_ahead);
	times->fence_ns = mpsd_fence_ended_ns();
	if (is)
		switch_over();
	mpsd_opaque_end();
	mpsd_turn_give(turn);
	mpsd_made_unlock();
	pthread_mutex_unlock(&mpsd_windows_lock);
	return is;
}

/* Zones absorb in the copy that they were laid for. */
static bool is_uncovered;

/* Piece by piece: each may wait for the driver, and who allocates or frees waits for no other. */
bool mpsd_cover_step(void)
{
	if (is_uncovered) {
		is_uncovered = false;
		pthread_mutex_lock(&mpsd_windows_lock);
		mpsd_zones_lift();
		mpsd_zones_lay();
		pthread_mutex_unlock(&mpsd_windows_lock);
	}
	return mpsd_zones_step();
}

void mpsd_cover_again(void)
{
	while (mpsd_cover_step())
		;
}

/* What was in flight, in the copy that is in use now. Why some of it may be missing; NULL: nothing is. */
static const char *go_on(bool planned, bool again, struct mpsd_replayed *replayed)
{
	if (mpsd_exact()) {
		mpsd_exact_move(again, replayed);
		if (!replayed->unsure || !mpsd_work_lost())
			return NULL;
		return replayed->unsure;
	}
	*replayed = (struct mpsd_replayed){ 0 };
	mpsd_hosts_lose();
	return !planned && mpsd_work_lost() ? "mode keep" : NULL;
}

/* After what is done again in the legacy stream, which would end a capture in a stream that blocks with it. */
static void go_on_capturing(void)
{
	if (!mpsd_capturing())
		return;
	mpsd_autopsy_line_calls(true);
	mpsd_enter_context();
	mpsd_captures_move();
	real_cuCtxSetCurrent(NULL);
	mpsd_autopsy_line_calls(false);
}

/* Calls are held until what was in flight may be done again. */
static bool waits_for_turn;
static uint64_t turn_until_ns;

bool mpsd_turn_is_due(void)
{
	return waits_for_turn;
}

int mpsd_turn_left_ms(void)
{
	uint64_t now = mpsd_now_ns();

	if (!waits_for_turn)
		return -1;
	return now < turn_until_ns ? (int)((turn_until_ns - now) / 1000000) + 1 : 0;
}

int mpsd_due_ms(void)
{
	int turn = mpsd_turn_left_ms(), end = mpsd_left_ms();

	if (mpsd_fence_is_unfinished() && !waits_for_turn)
		return 0;
	if (turn < 0 || (end >= 0 && end < turn))
		turn = end;
	return mpsd_turn_runs_on() && (turn < 0 || turn > LOOK_MS) ? LOOK_MS : turn;
}

void mpsd_move_tend(void)
{
	/* Not while others wait for it to hear of its turn. */
	if (!waits_for_turn)
		mpsd_fence_finish();
	mpsd_standby_tend();
}

static void say_missing(const struct mpsd_replayed *replayed)
{
	if (replayed->unsure)
		mpsd_say("failed over to a standby context with all memory; results of work in flight may be missing (%s)",
			 replayed->unsure);
}

/* For how long no kernel was new, as MOVED has it. */
static uint64_t new_before(uint64_t held_ns)
{
	uint64_t launched_ns = mpsd_exact_newest_ns();

	if (!launched_ns)
		return 1;
	return 2 + (held_ns > launched_ns ? (held_ns - launched_ns) / 1000000 : 0);
}

void mpsd_turn(bool may, struct mpsd_replayed *replayed)
{
	replayed->unsure = go_on(false, may, replayed);
	go_on_capturing();
	say_missing(replayed);
	waits_for_turn = false;
	mpsd_phase_end(true);
}

bool mpsd_move(const struct mpsd_move_order *order, struct mpsd_times *times, const char **why)
{
	enum mpsd_failover_again again = order->again;
	bool is, in_turn, planned = order->planned;
	bool may_go_ahead = mpsd_exact() && !planned && again == MPSD_FAILOVER_AGAIN;

	times->replayed = (struct mpsd_replayed){ 0 };
	*why = "the replay of the previous fail-over is not complete";
	if (planned && waits_for_turn)
		return false;
	/* Where nothing is lost, calls go on while a lazy standby is made. */
	if (planned && !mpsd_standby_come(why))
		return false;
	if (!waits_for_turn)
		mpsd_phase_begin();
	/* In this order: who waits for the one looks at the other. */
	mpsd_standby_leave(true);
	mpsd_line_moves();
	if (again == MPSD_FAILOVER_IN_TURN && mpsd_blame_is_told())
		mpsd_blame_begin(mpsd_in_use_number(), order->was_logged);
	/* Of the move before, after which it still waits. */
	mpsd_fence_finish();
	is = hold_and_switch(&planned, may_go_ahead, times, why);
	is_uncovered = is_uncovered || is;
	if (is) {
		mpsd_standby_used();
	} else {
		mpsd_standby_leave(false);
		mpsd_exact_stay();
	}
	in_turn = again == MPSD_FAILOVER_IN_TURN || again == MPSD_FAILOVER_AT_ONCE;
	times->whose = mpsd_blame_end(order->hurries);
	/* Who made the fault does nothing here, whatever it had in flight, before it is known what becomes of it. */
	if (is && in_turn && (mpsd_exact_is_due(&times->replayed.operations, &times->takes_ns) ||
			      times->whose == MPSD_FAILOVER_WHOSE_OWN)) {
		waits_for_turn = true;
		times->waits = new_before(times->held_ns);
		turn_until_ns = mpsd_now_ns() + TURN_MS * 1000000ull;
		times->on_ns = mpsd_now_ns();
		return true;
	}
	times->waits = 0;
	if (is || waits_for_turn) {
		times->replayed.unsure = go_on(planned, is && again != MPSD_FAILOVER_LOST, &times->replayed);
		if (!mpsd_fence_complete())
			times->replayed.unsure = MPSD_STILL_WRITES;
		times->fence_ns = mpsd_fence_ended_ns();
		go_on_capturing();
		say_missing(&times->replayed);
	}
	mpsd_phase_end(is || waits_for_turn);
	waits_for_turn = false;
	times->on_ns = mpsd_now_ns();
	mpsd_cover_again();
	return is;
}
