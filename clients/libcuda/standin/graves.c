// SPDX-License-Identifier: MIT
/*
 * Handles of what has ended: whoever uses one is found, as long as nothing new has it. What NVIDIA's driver does then is
 * not said anywhere.
 */
#include <stdio.h>
#include <stdlib.h>

#include "standin.h"

#define GRAVES 1024		/* the latest */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const void *graves[GRAVES];
static unsigned int count;

static const void **grave_of(const void *handle)
{
	for (unsigned int i = 0; handle && i < GRAVES; i++)
		if (graves[i] == handle)
			return &graves[i];
	return NULL;
}

void is_gone(const void *handle)
{
	pthread_mutex_lock(&lock);
	graves[count++ % GRAVES] = handle;
	pthread_mutex_unlock(&lock);
}

void is_new(const void *handle)
{
	const void **grave;

	pthread_mutex_lock(&lock);
	while ((grave = grave_of(handle)))
		*grave = NULL;
	pthread_mutex_unlock(&lock);
}

void must_live(const void *handle)
{
	bool is;

	pthread_mutex_lock(&lock);
	is = grave_of(handle) != NULL;
	pthread_mutex_unlock(&lock);
	if (!is)
		return;
	fputs("standin: a module, function or graph that has ended is used\n", stderr);
	abort();
}
