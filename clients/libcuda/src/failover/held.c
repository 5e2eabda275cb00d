// SPDX-License-Identifier: MIT
/* The lock of the records of made.h, and the record whose twin is made without it: one at a time, by the mover's thread. */
#include <pthread.h>
#include <stdatomic.h>

#include "failover/line.h"
#include "failover/made.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t was_let_go = PTHREAD_COND_INITIALIZER;
static struct mpsd_made *held;
static bool has_changed;
static bool is_short;		/* and it was not said yet */
static atomic_uint waiting;

void mpsd_made_lock(void)
{
	pthread_mutex_lock(&lock);
}

void mpsd_made_unlock(void)
{
	static const char short_of[] = "more handles than the proxy can track";
	/* Before a move that waits for the lock goes on. */
	bool is = is_short && mpsd_opaque_note(short_of);

	is_short = false;
	pthread_mutex_unlock(&lock);
	if (is)
		mpsd_opaque_noted(short_of);
}

void mpsd_made_short(void)
{
	is_short = true;
}

struct mpsd_made *mpsd_made_held(void)
{
	return held;
}

void mpsd_made_hold(struct mpsd_made *made)
{
	held = made;
	has_changed = false;
}

bool mpsd_made_let_go(void)
{
	held = NULL;
	pthread_cond_broadcast(&was_let_go);
	return !has_changed;
}

void mpsd_made_changed(const struct mpsd_made *made)
{
	has_changed |= made == held;
}

bool mpsd_made_wait(void)
{
	int before;

	/* A thread that is cancelled in a call of the driver's would keep the lock. */
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
	atomic_fetch_add(&waiting, 1);
	pthread_cond_wait(&was_let_go, &lock);
	atomic_fetch_sub(&waiting, 1);
	pthread_setcancelstate(before, NULL);
	return true;
}

bool mpsd_made_is_awaited(void)
{
	return atomic_load(&waiting) != 0;
}

/* In a forked child, which has no other thread: nothing is made there. */
void mpsd_made_lock_child(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	was_let_go = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
	atomic_store(&waiting, 0);
	held = NULL;
}
