// SPDX-License-Identifier: MIT
/*
 * A program whose allocation fails gets the memory that its standby takes, and then what others have for a fail-over alone.
 * The daemon offers the next standby later.
 */
#include "failover/room.h"

#include <errno.h>
#include <pthread.h>

#include "clock.h"
#include "exact/order.h"
#include "exact/undo.h"
#include "failover/cost.h"
#include "failover/line.h"
#include "failover/move.h"
#include "thread.h"

#define GIVE_MS 2000
#define OTHERS_MS 4000
#define END_MS 500

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static const char *wanted;	/* the standby's memory, by whom */
static atomic_bool may_ask, is_over;

/* Of this program's question: one at a time. */
static pthread_mutex_t asking = PTHREAD_MUTEX_INITIALIZER;
static enum { NOT_ASKED, TO_ASK, ASKED, ANSWERED } question;
static struct mpsd_shortage asked_for;
static uint64_t is_free, answer;

/* Of another program's. */
static enum { NOT_GIVING, GIVING, GAVE } gift;
static enum mpsd_failover_spared given_spared;
static uint64_t given;

static bool ask_standby(const char *who)
{
	struct timespec until = mpsd_in(GIVE_MS);
	bool is;

	if (!mpsd_line_ready() || mpsd_standby_is_lazy())
		return false;
	pthread_mutex_lock(&lock);
	wanted = who;
	mpsd_line_wake();
	while (wanted && pthread_cond_timedwait(&changed, &lock, &until) != ETIMEDOUT)
		;
	is = !wanted;
	wanted = NULL;
	pthread_mutex_unlock(&lock);
	return is;
}

bool mpsd_room_ask(void)
{
	return ask_standby("its memory was needed");
}

const char *mpsd_room_wanted(void)
{
	const char *who;

	pthread_mutex_lock(&lock);
	who = wanted;
	pthread_mutex_unlock(&lock);
	return who;
}

void mpsd_room_is_given(void)
{
	pthread_mutex_lock(&lock);
	wanted = NULL;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

bool mpsd_room_ask_others(struct mpsd_shortage *shortage)
{
	static uint64_t numbers;	/* with the lock */
	struct timespec until = mpsd_in(OTHERS_MS);
	size_t left = 0, total;
	bool is;

	if (!atomic_load(&may_ask) || real_cuMemGetInfo_v2(&left, &total) != CUDA_SUCCESS ||
	    pthread_mutex_timedlock(&asking, &until))
		return false;
	pthread_mutex_lock(&lock);
	question = TO_ASK;
	if (!shortage->number)
		shortage->number = ++numbers;
	asked_for = *shortage;
	is_free = left;
	mpsd_line_wake();
	while (question != ANSWERED && atomic_load(&may_ask) &&
	       pthread_cond_timedwait(&changed, &lock, &until) != ETIMEDOUT)
		;
	is = question == ANSWERED && answer;
	question = NOT_ASKED;
	pthread_mutex_unlock(&lock);
	pthread_mutex_unlock(&asking);
	return is;
}

static void answer_with(uint64_t bytes)
{
	pthread_mutex_lock(&lock);
	if (question == TO_ASK || question == ASKED) {
		question = ANSWERED;
		answer = bytes;
	}
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

void mpsd_room_may_ask(bool is)
{
	atomic_store(&may_ask, is);
	if (!is)
		answer_with(0);
}

static bool find_word(struct mpsd_failover_message *message)
{
	bool says = true;

	pthread_mutex_lock(&lock);
	if (gift == GAVE) {
		*message = mpsd_line_message(MPSD_FAILOVER_GAVE, 0, NULL);
		message->values[0] = given;
		gift = NOT_GIVING;
	} else if (question == TO_ASK) {
		*message = mpsd_line_message(MPSD_FAILOVER_SHORT, 0, NULL);
		message->values[0] = asked_for.bytes;
		message->values[1] = is_free;
		message->values[2] = asked_for.number;
		question = ASKED;
	} else {
		says = false;
	}
	pthread_mutex_unlock(&lock);
	return says;
}

bool mpsd_room_tell(int line)
{
	struct mpsd_failover_message message;
	bool is = true;

	while (is && find_word(&message))
		is = mpsd_line_say(line, &message);
	return is;
}

/* As a call of the program's: a move may overtake it. */
static uint64_t give_undo(void)
{
	uint64_t before, moves, after;
	CUresult result;

	do {
		moves = mpsd_carry_enter();
		before = mpsd_undo_bytes();
		result = before ? mpsd_enter_context() : CUDA_SUCCESS;
		if (before && result == CUDA_SUCCESS)
			result = mpsd_in_order(mpsd_undo_give_back);
		after = mpsd_undo_bytes();
		mpsd_carry_leave(moves);
	} while (result == MPSD_AGAIN && !atomic_load(&is_over));
	if (before <= after)
		return 0;
	mpsd_undo_rest();
	return before - after;
}

static uint64_t give_standby(void)
{
	uint64_t bytes = mpsd_cost_bytes();

	return ask_standby("another program needed its memory") ? (bytes ? bytes : 1) : 0;
}

/* Not by the thread of line.c: a program may have to wait for its work first, and that thread moves it if that is lost. */
static void *give(void *unused)
{
	uint64_t bytes = given_spared == MPSD_FAILOVER_SPARED_ROOM ? give_undo() : give_standby();

	pthread_mutex_lock(&lock);
	gift = GAVE;
	given = bytes;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
	mpsd_line_wake();
	return unused;
}

/* What is asked for while something is being given is not: who asks goes on to another one after a while. */
static void begin_to_give(enum mpsd_failover_spared spared)
{
	pthread_mutex_lock(&lock);
	if (gift != GIVING && !atomic_load(&is_over)) {
		given_spared = spared;
		gift = mpsd_thread_start(give, NULL) ? GIVING : NOT_GIVING;
	}
	pthread_mutex_unlock(&lock);
}

void mpsd_room_told(const struct mpsd_failover_message *order)
{
	if (order->kind == MPSD_FAILOVER_ROOM)
		answer_with(order->values[0]);
	else
		begin_to_give((enum mpsd_failover_spared)order->values[0]);
}

void mpsd_room_at_end(void)
{
	struct timespec until = mpsd_in(END_MS);

	atomic_store(&is_over, true);
	mpsd_room_may_ask(false);
	pthread_mutex_lock(&lock);
	while (gift == GIVING && pthread_cond_timedwait(&changed, &lock, &until) != ETIMEDOUT)
		;
	pthread_mutex_unlock(&lock);
}

/* In a forked child, which is no client. */
void mpsd_room_child(void)
{
	lock = asking = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
	atomic_store(&may_ask, false);
	atomic_store(&is_over, true);
}
