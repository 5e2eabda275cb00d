// SPDX-License-Identifier: MIT
/* The records, found by the program's names and by the driver's. */
#include "failover/names.h"

#include <pthread.h>

#include "failover/ahead.h"
#include "failover/graph.h"
#include "failover/line.h"

#define BUCKETS 4096

/*
 * Who makes and ends records has the lock of held.c; who changes the buckets or what they lead to has `names` too, for
 * writing; who looks a name up has that alone, for a graph's twin is made with the lock, and may take long.
 */
static pthread_rwlock_t names = PTHREAD_RWLOCK_INITIALIZER;
static struct mpsd_made *by_name[BUCKETS], *by_native[BUCKETS];
static uint64_t natives_of_moves;

static unsigned int bucket(const void *handle)
{
	return (unsigned int)(((uintptr_t)handle * 0x9e3779b97f4a7c15ull) >> 52);
}

struct mpsd_made *mpsd_made_find(const void *name)
{
	struct mpsd_made *made = name ? by_name[bucket(name)] : NULL;

	while (made && made->name != name)
		made = made->next_name;
	return made;
}

struct mpsd_made *mpsd_names_native(const void *native)
{
	struct mpsd_made *made = native ? by_native[bucket(native)] : NULL;

	while (made && made->native != native)
		made = made->next_native;
	return made;
}

/*
 * A handle of the first copy's that nobody knows, for it came by a way that is not followed, would lead another copy
 * astray. In what it finds here there is nothing that it could take for its own. Not for CU_STREAM_LEGACY and the like.
 */
#define LARGEST_WORD 0x10
static char nothing[4096];

bool mpsd_made_is_word(const void *name)
{
	return (uintptr_t)name <= LARGEST_WORD;
}

static void *unknown(const void *name)
{
	return mpsd_made_is_word(name) ? (void *)name : nothing;
}

_Thread_local bool mpsd_thread_is_ahead;

void *mpsd_native_of(const void *name)
{
	struct mpsd_made *made;
	void *native;

	pthread_rwlock_rdlock(&names);
	made = mpsd_made_find(name);
	native = !made ? unknown(name) : mpsd_thread_is_ahead ? made->twin : made->native;
	if (made && !mpsd_thread_is_ahead && mpsd_tables()->moves != natives_of_moves)
		native = NULL;
	pthread_rwlock_unlock(&names);
	return native;
}

struct mpsd_made *mpsd_made_look(const void *name)
{
	pthread_rwlock_rdlock(&names);
	return mpsd_made_find(name);
}

void mpsd_made_looked(void)
{
	pthread_rwlock_unlock(&names);
}

void *mpsd_name_of(const void *native)
{
	struct mpsd_made *made = NULL;
	void *name;

	if (!mpsd_tables()->moves)
		return (void *)native;
	pthread_rwlock_rdlock(&names);
	made = mpsd_names_native(native);
	name = made ? made->name : (void *)native;
	pthread_rwlock_unlock(&names);
	return name;
}

static void enter_name(struct mpsd_made *made)
{
	made->next_name = by_name[bucket(made->name)];
	by_name[bucket(made->name)] = made;
}

/* What is not there in the copy in use cannot be looked for. */
static void enter_native(struct mpsd_made *made)
{
	if (!made->native)
		return;
	made->next_native = by_native[bucket(made->native)];
	by_native[bucket(made->native)] = made;
}

static void strike_name(struct mpsd_made *made)
{
	struct mpsd_made **link = &by_name[bucket(made->name)];

	while (*link != made)
		link = &(*link)->next_name;
	*link = made->next_name;
}

static void strike_native(struct mpsd_made *made)
{
	struct mpsd_made **link = &by_native[bucket(made->native)];

	while (made->native && *link != made)
		link = &(*link)->next_native;
	if (made->native)
		*link = made->next_native;
}

void mpsd_names_enter(struct mpsd_made *made)
{
	if (!made->name)
		return;
	pthread_rwlock_wrlock(&names);
	enter_name(made);
	enter_native(made);
	pthread_rwlock_unlock(&names);
}

void mpsd_names_strike(struct mpsd_made *made)
{
	if (!made->name)
		return;
	pthread_rwlock_wrlock(&names);
	strike_name(made);
	strike_native(made);
	pthread_rwlock_unlock(&names);
}

void mpsd_made_native(struct mpsd_made *made, void *native)
{
	pthread_rwlock_wrlock(&names);
	strike_native(made);
	made->native = native;
	enter_native(made);
	pthread_rwlock_unlock(&names);
}

void mpsd_made_regraph(struct mpsd_made *made, struct mpsd_graph *graph)
{
	struct mpsd_graph *before = made->graph;

	pthread_rwlock_wrlock(&names);
	made->graph = graph;
	pthread_rwlock_unlock(&names);
	mpsd_graph_let_go(before);
}

uint64_t mpsd_names_moves(void)
{
	return natives_of_moves;
}

void mpsd_made_move(void)
{
	pthread_rwlock_wrlock(&names);
	natives_of_moves = mpsd_moves_done() + 2;
	for (unsigned int i = 0; i < BUCKETS; i++)
		by_native[i] = NULL;
	for (struct mpsd_made *made = mpsd_made_oldest(); made; made = made->newer) {
		mpsd_ahead_move(made);
		made->native = made->twin;
		made->twin = NULL;
		made->is_twin = mpsd_made_is_late(made->kind);
		if (!made->is_twin)
			atomic_fetch_add(&mpsd_made_waiting, 1);
		if (made->name)
			enter_native(made);
	}
	pthread_rwlock_unlock(&names);
}

/* In a forked child, where another thread of the parent's may have had them. */
void mpsd_made_child(void)
{
	mpsd_made_lock_child();
	names = (pthread_rwlock_t)PTHREAD_RWLOCK_INITIALIZER;
}
