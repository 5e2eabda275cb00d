// SPDX-License-Identifier: MIT
#include "marks.h"

#include <pthread.h>
#include <stdlib.h>

#define BUCKETS 1024

/* Far from the ids that a driver counts up from 1. */
#define FIRST_ID ((uint64_t)1 << 62)

struct mark {
	struct mark *next;
	CUdeviceptr base;
	uint64_t id;
	bool sync_memops;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct mark *marks[BUCKETS];
static size_t count;
static uint64_t last_id = FIRST_ID;

static struct mark **find(CUdeviceptr base)
{
	struct mark **link = &marks[(base >> 9) % BUCKETS];

	while (*link && (*link)->base != base)
		link = &(*link)->next;
	return link;
}

/* Under the lock. */
static struct mark *get(CUdeviceptr base)
{
	struct mark **link = find(base);

	if (!*link) {
		*link = calloc(1, sizeof(**link));
		if (!*link)
			return NULL;
		(*link)->base = base;
		(*link)->id = ++last_id;
		__atomic_store_n(&count, count + 1, __ATOMIC_RELAXED);
	}
	return *link;
}

uint64_t mpsd_mark_id(CUdeviceptr base)
{
	struct mark *mark;
	uint64_t id;

	pthread_mutex_lock(&lock);
	mark = get(base);
	id = mark ? mark->id : 0;
	pthread_mutex_unlock(&lock);
	return id;
}

bool mpsd_mark_sync_memops(CUdeviceptr base)
{
	struct mark *mark;
	bool is;

	if (!__atomic_load_n(&count, __ATOMIC_RELAXED))
		return false;
	pthread_mutex_lock(&lock);
	mark = *find(base);
	is = mark && mark->sync_memops;
	pthread_mutex_unlock(&lock);
	return is;
}

bool mpsd_mark_set_sync_memops(CUdeviceptr base, bool on)
{
	struct mark *mark;

	pthread_mutex_lock(&lock);
	mark = get(base);
	if (mark)
		mark->sync_memops = on;
	pthread_mutex_unlock(&lock);
	return mark != NULL;
}

void mpsd_mark_forget(CUdeviceptr base)
{
	struct mark **link, *mark;

	if (!__atomic_load_n(&count, __ATOMIC_RELAXED))
		return;
	pthread_mutex_lock(&lock);
	link = find(base);
	mark = *link;
	if (mark) {
		*link = mark->next;
		__atomic_store_n(&count, count - 1, __ATOMIC_RELAXED);
	}
	pthread_mutex_unlock(&lock);
	free(mark);
}
