// SPDX-License-Identifier: MIT
/*
 * What the driver is asked, or given, behind the program's back of a thing that another thread of the program may end
 * meanwhile: its end waits for the answer, for the driver takes what it is given for what it was.
 */
#include <pthread.h>
#include <sched.h>

#include "failover/made.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct mpsd_asked *oldest;

bool mpsd_ask_begin(struct mpsd_asked *asked, const void *name)
{
	const struct mpsd_made *made = mpsd_made_look(name);
	bool is = (made || mpsd_made_is_word(name)) && !mpsd_is_left();

	if (is) {
		asked->native = made ? made->native : (void *)name;
		asked->moves = mpsd_tables()->moves;
		pthread_mutex_lock(&lock);
		asked->next = oldest;
		oldest = asked;
		pthread_mutex_unlock(&lock);
	}
	mpsd_made_looked();
	return is;
}

void mpsd_ask_end(const struct mpsd_asked *asked)
{
	struct mpsd_asked **link = &oldest;

	pthread_mutex_lock(&lock);
	while (*link != asked)
		link = &(*link)->next;
	*link = asked->next;
	pthread_mutex_unlock(&lock);
}

static bool is_asked(const void *native, uint64_t moves)
{
	bool is = false;

	pthread_mutex_lock(&lock);
	for (const struct mpsd_asked *asked = oldest; asked; asked = asked->next)
		is |= asked->native == native && asked->moves == moves;
	pthread_mutex_unlock(&lock);
	return is;
}

bool mpsd_asked_ends(const void *native, uint64_t moves)
{
	while (is_asked(native, moves) && !mpsd_is_left())
		sched_yield();
	return !mpsd_is_left();
}

void mpsd_asked_child(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	oldest = NULL;
}
