// SPDX-License-Identifier: MIT
#include "exact/shelf.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "proxy.h"

#define ROOM ((size_t)256 << 10)
#define ALIGNMENT ((size_t)16)
#define LINE ((size_t)64)
#define AHEAD ((size_t)256)
#define MOST_SPARE 64		/* are kept; the others are freed */
#define OPEN (1u << 31)

struct mpsd_shelf {
	struct mpsd_shelf *next;	/* of the spare ones */
	atomic_uint users;		/* what lies there; while more is put there: OPEN, less what was given back */
	_Alignas(64) char bytes[ROOM];
};

/* Under the lock: where the next one comes to lie. What is taken is counted here, where no other thread counts. */
static MPSD_WRITTEN_OFTEN struct {
	struct mpsd_shelf *shelf;
	size_t used;
	unsigned int taken;
} current;

/* Where that is, for who has no lock. */
static MPSD_WRITTEN_OFTEN _Atomic(const char *) coming;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;	/* of the spare ones */
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

void mpsd_shelf_take_back(struct mpsd_shelf *shelf)
{
	if (shelf == current.shelf)
		current.taken--;
	else
		mpsd_shelf_give(shelf);
}

/* False: there is no memory for another one. */
static bool begin_another(void)
{
	struct mpsd_shelf *next = take_spare(), *last = current.shelf;
	unsigned int taken = OPEN - current.taken;

	if (!next)
		next = aligned_alloc(_Alignof(struct mpsd_shelf), sizeof(*next));
	if (!next)
		return false;
	atomic_store(&next->users, OPEN);
	if (last && atomic_fetch_sub(&last->users, taken) == taken)
		put_aside(last);
	current = (__typeof__(current)){ next, 0, 0 };
	return true;
}

void mpsd_shelf_rest(void)
{
	if (current.shelf && atomic_load_explicit(&current.shelf->users, memory_order_acquire) == OPEN - current.taken) {
		atomic_store_explicit(&current.shelf->users, OPEN, memory_order_relaxed);
		current.used = current.taken = 0;
		atomic_store_explicit(&coming, current.shelf->bytes, memory_order_relaxed);
	}
}

/* Mostly it is as large as the one before. */
MPSD_OF_A_LAUNCH void mpsd_shelf_fetch(void)
{
	const char *next = atomic_load_explicit(&coming, memory_order_relaxed);

	for (size_t ahead = 0; next && ahead < AHEAD; ahead += LINE)
		__builtin_prefetch(next + ahead, 1);
}

MPSD_OF_A_LAUNCH void *mpsd_shelf_take(size_t size, struct mpsd_shelf **shelf)
{
	char *room;

	size = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
	if (size > ROOM)
		return NULL;
	if (current.used + size > ROOM)
		mpsd_shelf_rest();
	if ((!current.shelf || current.used + size > ROOM) && !begin_another())
		return NULL;
	room = current.shelf->bytes + current.used;
	current.used += size;
	current.taken++;
	atomic_store_explicit(&coming, room + size, memory_order_relaxed);
	*shelf = current.shelf;
	return room;
}

void mpsd_shelf_child(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
