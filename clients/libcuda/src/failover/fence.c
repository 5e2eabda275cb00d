// SPDX-License-Identifier: MIT
#include "failover/fence.h"

#include <poll.h>
#include <stdatomic.h>
#include <unistd.h>

#include "clock.h"
#include "exact/exact.h"
#include "failover/carry.h"
#include "failover/cut.h"
#include "failover/move.h"
#include "failover/spins.h"
#include "failover/undoroom.h"
#include "failover/unmapping.h"

#define END_MS 2000
#define ASK_MS 1
#define LONGEST_NS 10000000000ull	/* less than a held call waits */

static struct mpsd_unmapping *begun, *unfinished;	/* the mover's */
static uint64_t ended_ns;
static bool is_broken;
static int line = -1;
static uint64_t generation;

void mpsd_fence_listen(int fd, uint64_t number)
{
	line = fd;
	generation = number;
}

void mpsd_fence_child(void)
{
	mpsd_unmapping_child();
	mpsd_undoroom_child();
	begun = unfinished = NULL;
}

static bool is_said(uint64_t number)
{
	return mpsd_fence_is_said(line, number);
}

/*
 * That is the end of kernels. Whoever had the lock that this needs may have given it back a while later; not at each look,
 * for all that is in flight may be gone through.
 */
static bool is_told(struct mpsd_unmapping *unmapping)
{
	bool is_new = !unmapping->has_heard && is_said(generation);
	uint64_t now = mpsd_now_ns();

	if (!is_new && (!unmapping->has_heard || now < unmapping->asked_ns + ASK_MS * 1000000ull))
		return false;
	unmapping->has_heard = true;
	unmapping->asked_ns = now;
	return mpsd_exact_close();
}

static bool wait_for(struct mpsd_unmapping *unmapping)
{
	struct pollfd polled[2] = { { .fd = unmapping->ended, .events = POLLIN }, { .fd = line, .events = POLLIN } };

	for (;;) {
		if (poll(polled, 2, unmapping->has_heard ? ASK_MS : -1) < 0)
			continue;
		if (polled[0].revents)
			return atomic_load(&unmapping->is_through) && atomic_load(&unmapping->all);
		if ((polled[1].revents || unmapping->has_heard) && is_told(unmapping))
			return true;
		/* Or something else comes first: it is obeyed after the move. */
		if (polled[1].revents)
			polled[1].fd = -1;
	}
}

/* True, or the daemon says that it need not be. */
static bool cut_off(struct mpsd_unmapping *unmapping)
{
	enum mpsd_cut_state state = MPSD_CUT_FAILED;
	uint64_t began = mpsd_now_ns();
	bool spins = mpsd_fence_spins();

	while (unmapping->cut) {
		state = mpsd_cut_look(unmapping->cut);
		unmapping->goes_on = state != MPSD_CUT_DONE && unmapping->first < unmapping->count &&
				     mpsd_cut_is_enough(unmapping->cut);
		if (state != MPSD_CUT_GOES_ON || unmapping->goes_on || is_told(unmapping))
			break;
		mpsd_fence_rest(began, spins);
	}
	return state != MPSD_CUT_FAILED || unmapping->goes_on;
}

/* What is in flight is known now alone: what is done again goes by the same records. */
static bool go_ahead(struct mpsd_unmapping *unmapping)
{
	if (!mpsd_exact_go_ahead(&unmapping->may_be_told))
		return false;
	unmapping->is_ahead = unmapping->goes_on = true;
	unmapping->line = line;
	mpsd_undoroom_shut(unmapping->moves);
	if (mpsd_unmapping_start(unmapping)) {
		begun = unmapping;
		return true;
	}
	mpsd_undoroom_open(unmapping->moves);
	/* Nobody else looks at it. */
	unmapping->is_ahead = unmapping->goes_on = false;
	unmapping->line = -1;
	return false;
}

static bool begin(bool may_go_ahead)
{
	struct mpsd_unmapping *unmapping = mpsd_unmapping_prepare(generation);
	bool is;

	if (!unmapping)
		return false;
	is = mpsd_exact_is_over();
	if (!is)
		unmapping->cut = mpsd_cut_begin(mpsd_in_use_number(), unmapping->pieces, unmapping->count,
						unmapping->first);
	if (unmapping->cut && may_go_ahead && go_ahead(unmapping))
		return true;
	is = is || cut_off(unmapping);
	if (unmapping->goes_on)
		mpsd_undoroom_shut(unmapping->moves);
	if (mpsd_unmapping_start(unmapping)) {
		is = is || wait_for(unmapping);
	} else {
		mpsd_unmapping_do(unmapping);
		is = (is && !unmapping->goes_on) || atomic_load(&unmapping->all);
		unmapping->goes_on = false;
		mpsd_undoroom_open(unmapping->moves);
	}
	if (!unmapping->goes_on) {
		mpsd_unmapping_let_go(unmapping);
		return is;
	}
	/* What is in flight is known now alone: what is done again goes by the same records. */
	unmapping->may_be_told = mpsd_exact_close();
	unfinished = unmapping;
	/* Nobody says it again. */
	if (unmapping->has_heard)
		mpsd_fence_told(generation);
	return is;
}

bool mpsd_fence(bool may_go_ahead)
{
	bool is = begin(may_go_ahead);

	ended_ns = mpsd_now_ns();
	return is;
}

uint64_t mpsd_fence_ended_ns(void)
{
	return ended_ns;
}

bool mpsd_fence_is_ahead(void)
{
	return begun != NULL;
}

void mpsd_fence_opens(uint32_t *gate)
{
	if (!begun)
		return;
	atomic_store(&begun->gate, gate);
	mpsd_unmapping_open_gate(begun);
}

static bool is_decided(struct mpsd_unmapping *unmapping)
{
	mpsd_unmapping_hear(unmapping);
	ended_ns = atomic_load(&unmapping->decided_ns);
	return ended_ns != 0;
}

bool mpsd_fence_complete(void)
{
	struct mpsd_unmapping *unmapping = begun;
	uint64_t since = mpsd_now_ns();
	/* Beside who opens the gate. */
	bool spins = mpsd_fence_spins_too();

	if (!unmapping)
		return !is_broken;
	while (!is_decided(unmapping)) {
		if (mpsd_now_ns() > since + LONGEST_NS)
			mpsd_unmapping_decide(unmapping, MPSD_FENCE_BROKEN);
		else
			mpsd_fence_rest(since, spins);
	}
	/* Who decided may be about to. */
	mpsd_unmapping_open_gate(unmapping);
	mpsd_unmapping_hear_no_more(unmapping);
	if (atomic_load(&unmapping->is_told))
		mpsd_undoroom_open(unmapping->moves);
	begun = NULL;
	unfinished = unmapping;
	if (atomic_load(&unmapping->verdict) == MPSD_FENCE_BROKEN) {
		is_broken = true;
		mpsd_work_lose();
	}
	return !is_broken;
}

void mpsd_fence_finish(void)
{
	if (!unfinished)
		return;
	while (!atomic_load(&unfinished->is_behind) && !atomic_load(&unfinished->is_told)) {
		if (mpsd_undoroom_is_left_off())
			return;
		if (is_said(unfinished->generation))
			mpsd_fence_told(unfinished->generation);
		else
			usleep(MPSD_FENCE_LOOK_NS / 1000);
	}
	if (!atomic_load(&unfinished->is_told) && atomic_load(&unfinished->is_through) && !atomic_load(&unfinished->all))
		mpsd_exact_lose_room();
	mpsd_undoroom_open(unfinished->moves);
	mpsd_unmapping_let_go(unfinished);
	unfinished = NULL;
}

bool mpsd_fence_is_unfinished(void)
{
	return unfinished != NULL;
}

void mpsd_fence_told(uint64_t number)
{
	if (!unfinished || unfinished->generation != number || !unfinished->may_be_told)
		return;
	atomic_store(&unfinished->is_told, true);
	mpsd_undoroom_open(unfinished->moves);
}

bool mpsd_fence_hears(void)
{
	bool is = is_said(generation);

	if (is)
		mpsd_fence_told(generation);
	return is;
}

void mpsd_fence_leave_off(void)
{
	mpsd_undoroom_leave_off();
}

void mpsd_fence_at_end(void)
{
	static uint64_t until_ns;
	uint64_t now = mpsd_now_ns();

	if (!until_ns)
		until_ns = now + END_MS * 1000000ull;
	if (now < until_ns)
		mpsd_unmapping_await((int)((until_ns - now) / 1000000) + 1);
}
