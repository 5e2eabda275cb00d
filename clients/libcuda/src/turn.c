// SPDX-License-Identifier: MIT
#include "turn.h"

#include <pthread.h>
#include <stdatomic.h>

#include "clock.h"
#include "failover/carry.h"
#include "failover/unmapping.h"

/* A wait looks that often whether the end has come. */
#define LOOK_MS 100
#define END_MS 1000

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool barred;

static bool take(void)
{
	while (!atomic_load(&barred)) {
		struct timespec until = mpsd_in(LOOK_MS);

		if (!pthread_mutex_timedlock(&turn, &until))
			return true;
	}
	return false;
}

bool mpsd_turn_take(void)
{
	bool taken = take();

	/* What is still in the copy that was left, where memory is being unmapped. */
	while (taken && mpsd_is_left() && mpsd_unmapping_lasts()) {
		pthread_mutex_unlock(&turn);
		mpsd_pause(1);
		taken = take();
	}
	return taken;
}

void mpsd_turn_give(bool taken)
{
	if (taken)
		pthread_mutex_unlock(&turn);
}

void mpsd_turn_keep(void)
{
	struct timespec until = mpsd_in(END_MS);

	if (!atomic_exchange(&barred, true) && pthread_mutex_timedlock(&turn, &until))
		return;
}

void mpsd_turn_forget(void)
{
	atomic_store(&barred, true);
}
