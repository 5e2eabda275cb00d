// SPDX-License-Identifier: MIT
/* A program whose allocation fails gets the memory that its standby takes. The daemon offers the next one later. */
#include <errno.h>
#include <pthread.h>

#include "clock.h"
#include "failover/line.h"
#include "failover/move.h"

#define GIVE_MS 2000

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool is_wanted;

bool mpsd_room_is_wanted(void)
{
	bool is;

	pthread_mutex_lock(&lock);
	is = is_wanted;
	pthread_mutex_unlock(&lock);
	return is;
}

void mpsd_room_is_given(void)
{
	pthread_mutex_lock(&lock);
	is_wanted = false;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

bool mpsd_room_ask(void)
{
	struct timespec until = mpsd_in(GIVE_MS);
	bool is;

	if (!mpsd_line_ready() || mpsd_standby_is_lazy())
		return false;
	pthread_mutex_lock(&lock);
	is_wanted = true;
	mpsd_line_wake();
	while (is_wanted && pthread_cond_timedwait(&changed, &lock, &until) != ETIMEDOUT)
		;
	is = !is_wanted;
	is_wanted = false;
	pthread_mutex_unlock(&lock);
	return is;
}
