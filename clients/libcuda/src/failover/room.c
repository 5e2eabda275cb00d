// SPDX-License-Identifier: MIT
/*
 * A program whose allocation fails gets the memory that its standby takes, and then what others have for a fail-over alone.
 * The daemon offers the next standby later.
 */
#include "failover/room.h"

#include <errno.h>
#include <pthread.h>

#include "clock.h"
#include "exact/exact.h"
#include "failover/carry.h"
#include "failover/line.h"
#include "failover/move.h"

#define STANDBY_MS 2000
#define OTHERS_MS 4000

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static atomic_bool may_ask;

/* For the standby's memory: how many have asked, how many of them the thread of line.c has seen, and answered. */
static uint64_t asks, seen, answered;
static const char *wanted;
static bool went;

/* For that of others: one at a time. */
static pthread_mutex_t asking = PTHREAD_MUTEX_INITIALIZER;
static enum { NOT_ASKED, TO_ASK, ASKED, ANSWERED } question;
static struct mpsd_shortage asked_for;
static uint64_t is_free, answer;

/* A thread of the program's that is cancelled meanwhile would keep the lock. */
static int keep_thread(void)
{
	int before;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
	return before;
}

bool mpsd_room_ask(const char *why)
{
	struct timespec until = mpsd_in(STANDBY_MS);
	uint64_t mine;
	int before;
	bool is;

	if (!mpsd_line_ready() || mpsd_standby_is_lazy())
		return false;
	before = keep_thread();
	pthread_mutex_lock(&lock);
	mine = ++asks;
	wanted = why;
	mpsd_line_wake();
	while (answered < mine && pthread_cond_timedwait(&changed, &lock, &until) != ETIMEDOUT)
		;
	is = answered >= mine && went;
	pthread_mutex_unlock(&lock);
	pthread_setcancelstate(before, NULL);
	return is;
}

const char *mpsd_room_wanted(void)
{
	const char *why;

	pthread_mutex_lock(&lock);
	seen = asks;
	why = answered < seen ? wanted : NULL;
	pthread_mutex_unlock(&lock);
	return why;
}

void mpsd_room_is_given(bool is)
{
	pthread_mutex_lock(&lock);
	answered = seen;
	went = is;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

/* What is free, where that is known, and no more is wanted than there is. */
static bool is_possible(const struct mpsd_shortage *shortage, uint64_t *left)
{
	size_t is = 0, all = 0;

	if (real_cuMemGetInfo_v2(&is, &all) != CUDA_SUCCESS)
		is = all = 0;
	*left = is;
	return !all || shortage->bytes <= all;
}

static bool ask_others(struct mpsd_shortage *shortage, uint64_t left)
{
	struct timespec until = mpsd_in(OTHERS_MS);
	static uint64_t numbers;	/* with the lock */
	bool is;

	if (pthread_mutex_timedlock(&asking, &until))
		return false;
	pthread_mutex_lock(&lock);
	if (!shortage->number)
		shortage->number = ++numbers;
	question = TO_ASK;
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

bool mpsd_room_ask_others(struct mpsd_shortage *shortage)
{
	uint64_t left;
	int before;
	bool is;

	if (!atomic_load(&may_ask) || !is_possible(shortage, &left))
		return false;
	before = keep_thread();
	is = ask_others(shortage, left);
	pthread_setcancelstate(before, NULL);
	return is;
}

void mpsd_room_may_ask(bool is)
{
	atomic_store(&may_ask, is);
	if (is)
		return;
	pthread_mutex_lock(&lock);
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

static bool ask_now(struct mpsd_failover_message *message)
{
	bool asks_now;

	pthread_mutex_lock(&lock);
	asks_now = question == TO_ASK;
	if (asks_now) {
		*message = mpsd_line_message(MPSD_FAILOVER_SHORT, 0, NULL);
		message->values[0] = asked_for.bytes;
		message->values[1] = is_free;
		message->values[2] = asked_for.number;
		question = ASKED;
	}
	pthread_mutex_unlock(&lock);
	return asks_now;
}

bool mpsd_room_tell(int line)
{
	struct mpsd_failover_message message;
	bool is = true;

	while (is && (mpsd_gift_told(&message) || ask_now(&message)))
		is = mpsd_line_say(line, &message);
	return is;
}

/* What comes too late is of an allocation that has failed by then: nobody asks for it any more. */
static void answer_with(uint64_t bytes, uint64_t number)
{
	pthread_mutex_lock(&lock);
	if (question == ASKED && asked_for.number == number) {
		question = ANSWERED;
		answer = bytes;
		pthread_cond_broadcast(&changed);
	}
	pthread_mutex_unlock(&lock);
}

void mpsd_room_told(const struct mpsd_failover_message *order)
{
	if (order->kind == MPSD_FAILOVER_ROOM)
		answer_with(order->values[0], order->values[1]);
	else if (order->values[0] <= MPSD_FAILOVER_SPARED_STANDBY)
		mpsd_gift_begin((enum mpsd_failover_spared)order->values[0]);
}

void mpsd_room_at_end(void)
{
	mpsd_room_may_ask(false);
	mpsd_gift_at_end();
}

/* In a forked child, which is no client. */
void mpsd_room_child(void)
{
	lock = asking = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
	atomic_store(&may_ask, false);
	question = NOT_ASKED;
	answered = seen = asks;
	mpsd_gift_child();
}
