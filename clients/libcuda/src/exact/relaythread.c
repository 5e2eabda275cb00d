// SPDX-License-Identifier: MIT
/* The relay's thread: when it is awake. */
#include <errno.h>
#include <sched.h>
#include <semaphore.h>

#include "clock.h"
#include "exact/relay.h"
#include "exact/shapes.h"
#include "exact/spending.h"
#include "failover/made.h"
#include "failover/wish.h"
#include "processors.h"
#include "thread.h"

#define BURST 16u		/* launches, one soon after another, that it is woken for */
#define SOON_US 100u		/* so soon, as a mean */
#define SPIN_NS 300000ull	/* without a launch, before it sleeps */
#define LOOKS 64u		/* between two looks at the clock */
#define TAKEN_NS 500000ull	/* it looked that long ago: somebody else had the processor, */
#define REST_NS 1000000000ull	/* who has it to himself for that long */
#define END_NS 200000000ull

static atomic_bool sleeps;
static atomic_bool is_over;		/* it does not wake any more, */
static atomic_bool is_busy;		/* and calls the driver until then */
static atomic_uint_least64_t rests_until;
static sem_t bell;

/* At the program's end nobody waits for long, and the driver is not called any more: whoever calls it says so first. */
static bool begin(void)
{
	atomic_store(&is_busy, true);
	if (!atomic_load(&is_over))
		return true;
	atomic_store(&is_busy, false);
	return false;
}

static void end(void)
{
	atomic_store(&is_busy, false);
}

static bool is_lost(uint64_t moves)
{
	return atomic_load(&mpsd_relay_lost_in) == 1 + moves;
}

/* One launch, if there is one. False: another copy is in use than that which is served. */
static bool give_one(uint64_t served, bool *is_given)
{
	uint64_t moves;

	*is_given = false;
	if (!begin())
		return false;
	moves = mpsd_carry_enter();
	if (moves == served)
		*is_given = mpsd_relay_give_one(moves);
	if (*is_given)
		mpsd_spending_relayed();
	mpsd_carry_leave(moves);
	end();
	return moves == served;
}

/* The moves before the copy that is served from now on; false: it has no context there. */
static bool serve(uint64_t *moves)
{
	bool is;

	if (!begin())
		return false;
	*moves = mpsd_carry_enter();
	is = !is_lost(*moves) && mpsd_enter_context() == CUDA_SUCCESS && !mpsd_is_left();
	mpsd_thread.is_in_context = is;
	mpsd_carry_leave(*moves);
	end();
	mpsd_word_take(&mpsd_exact_lock);
	is &= !atomic_load(&is_over);
	if (is)
		atomic_store(&mpsd_relay_serves, 1 + *moves);
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

/* Whether it looks once more; somebody else has had the processor, or no launch has come for a while, otherwise. */
static bool goes_on(uint64_t since, uint64_t *looked)
{
	uint64_t now = mpsd_now_ns(), before = *looked;

	*looked = now;
	if (now - before > TAKEN_NS)
		atomic_store(&rests_until, now + REST_NS);
	return now - before <= TAKEN_NS && now - since <= SPIN_NS;
}

/* Until it is to sleep; false: it can give none. */
static bool spin(void)
{
	bool always = mpsd_wish()->relay == MPSD_WISH_ALWAYS;
	uint64_t moves = 0, since = mpsd_now_ns(), looked = since;
	bool serves = serve(&moves);

	for (unsigned int looks = 1; serves; looks++) {
		bool is_given = false;

		if (mpsd_relay_has_any() || (atomic_load_explicit(&mpsd_moves, memory_order_relaxed) & ~1ull) != moves)
			serves = give_one(moves, &is_given) ? !is_lost(moves) : serve(&moves);
		if (is_given)
			since = looked = mpsd_now_ns();
		mpsd_word_pause();
		if (is_given || looks % LOOKS)
			continue;
		if (always)
			sched_yield();
		else if (!goes_on(since, &looked))
			return true;
	}
	return false;
}

/*
 * Nothing is left to it from here on. Of a lost context, and at the end, what is left who takes the order next gives; else,
 * and then this is false, it does so itself.
 */
static bool stop_serving(bool serves)
{
	bool is;

	mpsd_word_take(&mpsd_exact_lock);
	is = !serves || !mpsd_relay_has_any();
	if (is)
		atomic_store(&mpsd_relay_serves, 0);
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

static void *run(void *unused)
{
	bool serves;

	(void)unused;
	for (;;) {
		do
			serves = spin();
		while (!stop_serving(serves));
		atomic_store(&sleeps, true);
		while (sem_wait(&bell) && errno == EINTR)
			;
	}
	return NULL;
}

/* Nobody has an order who has not shut it, from before there was a relay. */
static bool turn_on(void)
{
	uint64_t moves = mpsd_tables()->moves;
	bool is;

	if (!mpsd_order_take(moves))
		return false;
	mpsd_word_take(&mpsd_exact_lock);
	/* In the next copy somebody may have its order already. */
	is = !mpsd_is_left();
	atomic_store(&mpsd_relay_on, is);
	mpsd_word_give(&mpsd_exact_lock);
	mpsd_order_give(moves);
	return is;
}

static bool has_processors(void)
{
	return mpsd_wish()->relay == MPSD_WISH_ALWAYS || mpsd_processors_are_several("/proc/self/cgroup", "/sys/fs/cgroup");
}

/* Once; but where a move has come between, again. */
static void start(void)
{
	static atomic_flag has_begun = ATOMIC_FLAG_INIT;

	if (atomic_flag_test_and_set(&has_begun))
		return;
	if (!has_processors() || sem_init(&bell, 0, 0)) {
		atomic_store(&is_over, true);
	} else if (!turn_on()) {
		atomic_flag_clear(&has_begun);
	} else if (!mpsd_thread_start(run, NULL)) {
		atomic_store(&mpsd_relay_on, false);
		atomic_store(&is_over, true);
		mpsd_say("no launch thread: threads of the program call the driver themselves; raise TasksMax or ulimit -u");
	}
}

/* Whether this thread has launched so often, one soon after another. The clock is seldom looked at. */
static bool is_burst(void)
{
	uint64_t now;
	uint32_t us;
	bool is;

	if (++mpsd_thread.launches % BURST)
		return false;
	now = mpsd_now_ns();
	us = (uint32_t)(now / 1000);
	is = us - mpsd_thread.launched_us < BURST * SOON_US && now > atomic_load(&rests_until);
	mpsd_thread.launched_us = us;
	return is;
}

static void want(void)
{
	enum mpsd_wish_relay wished = mpsd_wish()->relay;

	if (wished == MPSD_WISH_NEVER || atomic_load_explicit(&is_over, memory_order_relaxed) ||
	    atomic_load_explicit(&mpsd_relay_serves, memory_order_relaxed) ||
	    (atomic_load_explicit(&mpsd_relay_on, memory_order_relaxed) && !atomic_load(&sleeps)))
		return;
	if (wished != MPSD_WISH_ALWAYS && !is_burst())
		return;
	if (!atomic_load(&mpsd_relay_on))
		start();
	else if (atomic_exchange(&sleeps, false))
		sem_post(&bell);
}

void mpsd_relay_accepted(const struct mpsd_launch *given)
{
	mpsd_thread.is_in_context = true;
	if (mpsd_relay_is_awake())
		mpsd_shape_accept(given);
	else
		want();
}

void mpsd_relay_at_end(void)
{
	uint64_t until = mpsd_now_ns() + END_NS;

	mpsd_word_take(&mpsd_exact_lock);
	atomic_store(&is_over, true);
	atomic_store(&mpsd_relay_serves, 0);
	mpsd_word_give(&mpsd_exact_lock);
	while (atomic_load(&is_busy) && mpsd_now_ns() < until)
		sched_yield();
	/* In a move all are held, and in a function that a stream runs the driver is not called. */
	if (mpsd_relay_is_on() && !(atomic_load(&mpsd_moves) & 1) && !mpsd_is_forbidden())
		mpsd_relay_end(until);
}

void mpsd_relay_child(void)
{
	mpsd_relay_forget();
	atomic_store(&is_over, true);
}
