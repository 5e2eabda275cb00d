// SPDX-License-Identifier: MIT
#include "exact/shelf.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#define ROOM ((size_t)256 << 10)
#define ALIGNMENT ((size_t)16)
#define LINE ((size_t)64)
#define AHEAD ((size_t)1024)
#define MOST_SPARE 64		/* are kept; the others are freed */

struct mpsd_shelf {
	struct mpsd_shelf *next;	/* of the spare ones */
	size_t used;
	atomic_uint users;		/* what lies there; and 1 while more is put there */
	_Alignas(16) char bytes[ROOM];
};

static struct mpsd_shelf *current;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;	/* of these */
static struct mpsd_shelf *spare;
static unsigned int spares;

static struct mpsd_shelf *take_spare(void)
{
	struct mpsd_shelf *shelf;

	pthread_mutex_lock(&lock);
	shelf = spare;
	if (shelf) {
		spare = shelf->next;
		spares--;
	}
	pthread_mutex_unlock(&lock);
	return shelf;
}

static void put_aside(struct mpsd_shelf *shelf)
{
	pthread_mutex_lock(&lock);
	if (spares < MOST_SPARE) {
		shelf->next = spare;
		spare = shelf;
		spares++;
		shelf = NULL;
	}
	pthread_mutex_unlock(&lock);
	free(shelf);
}

void mpsd_shelf_give(struct mpsd_shelf *shelf)
{
	if (atomic_fetch_sub(&shelf->users, 1) == 1)
		put_aside(shelf);
}

/* False: there is no memory for another one. */
static bool begin_another(void)
{
	struct mpsd_shelf *next = take_spare();

	if (!next)
		next = malloc(sizeof(*next));
	if (!next)
		return false;
	next->used = 0;
	atomic_store(&next->users, 1);
	if (current)
		mpsd_shelf_give(current);
	current = next;
	return true;
}

void *mpsd_shelf_take(size_t size, struct mpsd_shelf **shelf)
{
	char *room;

	size = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
	if (size > ROOM)
		return NULL;
	/* All that was there has gone. */
	if (current && atomic_load_explicit(&current->users, memory_order_acquire) == 1)
		current->used = 0;
	if ((!current || current->used + size > ROOM) && !begin_another())
		return NULL;
	room = current->bytes + current->used;
	current->used += size;
	/* The next one is mostly as large, and comes when the program has used the processor's cache for other things. */
	for (size_t ahead = 0; ahead < AHEAD && current->used + ahead < ROOM; ahead += LINE)
		__builtin_prefetch(current->bytes + current->used + ahead, 1, 2);
	atomic_fetch_add_explicit(&current->users, 1, memory_order_relaxed);
	*shelf = current;
	return room;
}

void mpsd_shelf_child(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
