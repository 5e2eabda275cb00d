// SPDX-License-Identifier: MIT
/* order.c and word.c, with threads and with each futex call counted. Prints "ok". */
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>

#include "checking.h"
#include "exact/state.h"

#define THREADS 4
#define TIMES 20000
#define MOVED 2u

static void *none[1];
static const struct mpsd_tables tables = { none, none, 0 };
_Atomic(const struct mpsd_tables *) mpsd_tables_now = &tables;
_Thread_local struct mpsd_thread mpsd_thread;
atomic_uint_least64_t mpsd_moves;

/* There is no relay. */
atomic_bool mpsd_relay_on;

bool mpsd_relay_shut(uint64_t moves)
{
	(void)moves;
	return false;
}

bool mpsd_relay_shut_now(uint64_t moves)
{
	return mpsd_relay_shut(moves);
}

static atomic_uint waits, wakes;

long __real_syscall(long number, void *word, int what, unsigned int value, const void *until, void *other, int bits);

long __wrap_syscall(long number, void *word, int what, unsigned int value, const void *until, void *other, int bits);

long __wrap_syscall(long number, void *word, int what, unsigned int value, const void *until, void *other, int bits)
{
	CHECK(what == FUTEX_WAIT_PRIVATE || what == FUTEX_WAKE_PRIVATE);
	atomic_fetch_add(what == FUTEX_WAIT_PRIVATE ? &waits : &wakes, 1);
	return __real_syscall(number, word, what, value, until, other, bits);
}

static unsigned long taken;	/* by the holder of the order */

static void *take_often(void *unused)
{
	(void)unused;
	for (int i = 0; i < TIMES; i++) {
		CHECK(mpsd_order_take(0));
		taken++;
		mpsd_order_give(0);
	}
	return NULL;
}

static void one_at_a_time(void)
{
	pthread_t threads[THREADS];

	for (int i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&threads[i], NULL, take_often, NULL));
	for (int i = 0; i < THREADS; i++)
		CHECK(!pthread_join(threads[i], NULL));
	CHECK(taken == (unsigned long)THREADS * TIMES);
}

static void *take_once(void *got)
{
	errno = EDOM;
	*(bool *)got = mpsd_order_take(0);
	CHECK(errno == EDOM);
	return NULL;
}

/* Another thread waits for the order, which this thread holds. */
static pthread_t begin_to_wait(bool *got)
{
	unsigned int before = atomic_load(&waits);
	pthread_t thread;

	CHECK(mpsd_order_take(0));
	CHECK(!pthread_create(&thread, NULL, take_once, got));
	while (atomic_load(&waits) == before)
		sched_yield();
	return thread;
}

static void who_waits_is_woken(void)
{
	unsigned int before = atomic_load(&wakes);
	bool got = false;
	pthread_t thread = begin_to_wait(&got);

	mpsd_order_give(0);
	CHECK(!pthread_join(thread, NULL) && got && atomic_load(&wakes) == before + 1);
	/* The waiting thread does not exist in a forked child. */
	mpsd_orders_child();
	CHECK(mpsd_order_try(0));
	CHECK(!mpsd_order_try(0));
	mpsd_order_give(0);
}

/* The holder may never release it. */
static void who_waits_leaves_with_a_move(void)
{
	bool got = true;
	pthread_t thread = begin_to_wait(&got);

	atomic_store(&mpsd_moves, MOVED);
	CHECK(!pthread_join(thread, NULL) && !got);
	atomic_store(&mpsd_moves, 0);
	mpsd_order_give(0);
}

static CUresult with_it(void)
{
	CHECK(!mpsd_order_try(0));
	return CUDA_ERROR_UNKNOWN;
}

static void nobody_is_asked_where_nobody_waits(void)
{
	unsigned int before = atomic_load(&waits) + atomic_load(&wakes);

	CHECK(mpsd_order_take(0) && !mpsd_order_try(0));
	/* The next driver instance has another order. */
	CHECK(mpsd_order_try(MOVED));
	mpsd_order_give(MOVED);
	mpsd_order_give(0);
	CHECK(mpsd_in_order(with_it) == CUDA_ERROR_UNKNOWN);
	CHECK(mpsd_order_try(0));
	mpsd_order_give(0);
	CHECK(atomic_load(&waits) + atomic_load(&wakes) == before);
}

static struct mpsd_word word;

static void *take_word(void *got)
{
	errno = EDOM;
	mpsd_word_take(&word);
	*(bool *)got = true;
	mpsd_word_give(&word);
	CHECK(errno == EDOM);
	return NULL;
}

/* The waiting thread may check more than once before it gets the lock. */
static void a_word_is_waited_for(void)
{
	unsigned int before = atomic_load(&waits);
	bool got = false;
	pthread_t thread;

	CHECK(mpsd_word_try_for(&word, 0) && !mpsd_word_try(&word));
	CHECK(!pthread_create(&thread, NULL, take_word, &got));
	while (atomic_load(&waits) < before + 2)
		sched_yield();
	/* A wait that times out leaves the lock with its holder. */
	CHECK(!mpsd_word_try_for(&word, 1) && !got);
	mpsd_word_give(&word);
	CHECK(!pthread_join(thread, NULL) && got);
	CHECK(mpsd_word_try_for(&word, 0));
	mpsd_word_child(&word);
	CHECK(mpsd_word_try(&word));
	mpsd_word_give(&word);
}

int main(void)
{
	a_word_is_waited_for();
	nobody_is_asked_where_nobody_waits();
	who_waits_is_woken();
	who_waits_leaves_with_a_move();
	one_at_a_time();
	printf("ok\n");
	return 0;
}
