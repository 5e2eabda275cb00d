// SPDX-License-Identifier: MIT
/*
 * What this program has for a fail-over alone, for another one whose allocation fails. A thread sees to it: that of line.c
 * moves the program, which may be what is waited for.
 */
#include <errno.h>
#include <pthread.h>

#include "capture.h"
#include "clock.h"
#include "exact/order.h"
#include "exact/state.h"
#include "exact/undo.h"
#include "failover/cost.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "failover/made.h"
#include "failover/room.h"
#include "thread.h"

#define LOOK_NS 300000000ull	/* for a moment in which all has ended; the daemon waits for a second */
#define HOLD_NS 50000000ull	/* nothing new is given to the driver meanwhile */
#define END_MS 500

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static atomic_bool is_over;

/* Of each kind. */
static struct gift {
	enum { NOT_ASKED, GIVING, GAVE } state;
	uint64_t bytes;
} gifts[] = { [MPSD_FAILOVER_SPARED_ROOM] = { NOT_ASKED, 0 }, [MPSD_FAILOVER_SPARED_STANDBY] = { NOT_ASKED, 0 } };

static bool is_capturing(void)
{
	return mpsd_capture_active() || mpsd_capturing();
}

/* With the order: nothing is in flight that the copies are for, nothing goes on by itself, and nothing is captured. */
static bool is_still(void)
{
	bool is;

	if (is_capturing() || mpsd_hosts_are_open() || mpsd_epoch_is_waiting() ||
	    __atomic_load_n(&mpsd_epoch.unsure, __ATOMIC_RELAXED))
		return false;
	mpsd_word_take(&mpsd_exact_lock);
	is = mpsd_lanes_all_proven();
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

/* With the order. NOT_READY: not now, and nothing was given. */
static CUresult give_within(uint64_t ns)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	uint64_t until = mpsd_now_ns() + ns;
	CUresult result;

	if (is_capturing())
		return CUDA_ERROR_NOT_READY;
	/* Whoever captures from now on is not to lose that by what this thread does. */
	real_cuThreadExchangeStreamCaptureMode(&mode);
	result = mpsd_enter_context();
	if (result == CUDA_SUCCESS)
		result = mpsd_lanes_mark();
	while (result == CUDA_SUCCESS && !is_still()) {
		if (mpsd_is_left())
			return MPSD_AGAIN;
		if (mpsd_now_ns() >= until || atomic_load(&is_over))
			return CUDA_ERROR_NOT_READY;
		mpsd_pause(1);
	}
	if (result != CUDA_SUCCESS)
		return result;
	/* Before anybody else has the order, and takes some again. */
	mpsd_undo_rest();
	result = mpsd_undo_give_back();
	mpsd_undo_rest();
	return result;
}

/* A call like the program's: a move may overtake it. `ns`: how long the order may be kept; else it is only tried. */
static CUresult try_to_give(uint64_t ns)
{
	uint64_t moves = mpsd_carry_enter();
	bool may = mpsd_exact();
	CUresult result = may ? CUDA_ERROR_NOT_READY : CUDA_ERROR_INVALID_VALUE;

	if (may && (ns ? mpsd_order_take(moves) : mpsd_order_try(moves))) {
		result = give_within(ns);
		mpsd_order_give(moves);
	}
	mpsd_carry_leave(moves);
	return result;
}

static uint64_t give_room(void)
{
	uint64_t before = mpsd_undo_bytes(), until = mpsd_now_ns() + LOOK_NS, after;
	CUresult result = before ? try_to_give(0) : CUDA_SUCCESS;

	while ((result == CUDA_ERROR_NOT_READY || result == MPSD_AGAIN) && mpsd_now_ns() < until && !atomic_load(&is_over)) {
		mpsd_pause(1);
		result = try_to_give(0);
	}
	if (result == CUDA_ERROR_NOT_READY && !atomic_load(&is_over))
		try_to_give(HOLD_NS);
	after = mpsd_undo_bytes();
	return before > after ? before - after : 0;
}

static uint64_t give_standby(void)
{
	uint64_t bytes = mpsd_cost_bytes();

	return mpsd_room_ask("another program needed its memory") ? (bytes ? bytes : 1) : 0;
}

static void *give(void *which)
{
	struct gift *gift = which;
	uint64_t bytes = gift == &gifts[MPSD_FAILOVER_SPARED_ROOM] ? give_room() : give_standby();

	pthread_mutex_lock(&lock);
	gift->state = GAVE;
	gift->bytes = bytes;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
	mpsd_line_wake();
	return NULL;
}

/* What is being given, or was and is not told yet, is the answer to this, too. */
void mpsd_gift_begin(enum mpsd_failover_spared spared)
{
	struct gift *gift = &gifts[spared];

	pthread_mutex_lock(&lock);
	if (gift->state == NOT_ASKED && !atomic_load(&is_over) && mpsd_thread_start(give, gift))
		gift->state = GIVING;
	pthread_mutex_unlock(&lock);
}

bool mpsd_gift_told(struct mpsd_failover_message *message)
{
	bool is = false;

	pthread_mutex_lock(&lock);
	for (unsigned int i = 0; !is && i < sizeof(gifts) / sizeof(*gifts); i++) {
		is = gifts[i].state == GAVE;
		if (!is)
			continue;
		*message = mpsd_line_message(MPSD_FAILOVER_GAVE, 0, NULL);
		message->values[0] = gifts[i].bytes;
		message->values[1] = i;
		gifts[i].state = NOT_ASKED;
	}
	pthread_mutex_unlock(&lock);
	return is;
}

/* A standby goes with the thread of line.c, or not any more. */
void mpsd_gift_at_end(void)
{
	struct timespec until = mpsd_in(END_MS);

	atomic_store(&is_over, true);
	pthread_mutex_lock(&lock);
	while (gifts[MPSD_FAILOVER_SPARED_ROOM].state == GIVING &&
	       pthread_cond_timedwait(&changed, &lock, &until) != ETIMEDOUT)
		;
	pthread_mutex_unlock(&lock);
}

void mpsd_gift_child(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
	gifts[0].state = gifts[1].state = NOT_ASKED;
	atomic_store(&is_over, true);
}
