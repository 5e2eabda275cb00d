// SPDX-License-Identifier: MIT
/* The records, found by the program's names and by the driver's. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "failover/ahead.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "failover/made.h"
#include "failover/spare.h"

#define BUCKETS 4096

/*
 * Who makes and ends records has the lock of held.c; who changes the buckets or what they lead to has `names` too, for
 * writing; who looks a name up has that alone, for a graph's twin is made with the lock, and may take long.
 */
static pthread_rwlock_t names = PTHREAD_RWLOCK_INITIALIZER;
static struct mpsd_made *by_name[BUCKETS], *by_native[BUCKETS];
static struct mpsd_made *oldest, *newest;
atomic_uint mpsd_made_waiting;
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

static struct mpsd_made *find_native(const void *native)
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

bool mpsd_made_again(const void *name, uint64_t moves)
{
	struct mpsd_made *made;
	bool is;

	mpsd_made_lock();
	is = atomic_load(&mpsd_moves) == moves;
	made = is ? mpsd_made_find(name) : NULL;
	if (made)
		mpsd_made_changed(made);
	if (made && made->is_twin) {
		made->is_twin = false;
		atomic_fetch_add(&mpsd_made_waiting, 1);
		mpsd_line_wake();
	}
	mpsd_made_unlock();
	return is;
}

void *mpsd_name_of(const void *native)
{
	struct mpsd_made *made = NULL;
	void *name;

	if (!mpsd_tables()->moves)
		return (void *)native;
	pthread_rwlock_rdlock(&names);
	made = find_native(native);
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

static void append(struct mpsd_made *made)
{
	made->older = newest;
	made->newer = NULL;
	*(newest ? &newest->newer : &oldest) = made;
	newest = made;
	made->is_twin = mpsd_made_is_late(made->kind);
	if (!made->is_twin)
		atomic_fetch_add(&mpsd_made_waiting, 1);
	if (!made->is_twin || made->kind == MPSD_MADE_EXEC)
		mpsd_line_wake();
}

static bool add(struct mpsd_made *record, uint64_t moves)
{
	struct mpsd_made *made, *known = find_native(record->native);

	if (mpsd_made_is_late(record->kind) ? mpsd_is_left() : atomic_load(&mpsd_moves) != moves)
		return false;
	/* A driver answers twice with the same function. */
	if (known && known->kind == record->kind && known->of == record->of) {
		record->name = known->name;
		free(record->text);
		return true;
	}
	made = malloc(sizeof(*made));
	record->name = record->native;
	/* Before the first move nothing is translated: one function may come by two ways. */
	if (record->native && moves && mpsd_made_find(record->native))
		record->name = mpsd_spare_take();
	if (!made || (record->native && !record->name)) {
		mpsd_made_short();
		mpsd_spare_give(record->name);
		record->name = record->native;
		free(made);
		return true;
	}
	*made = *record;
	made->since = moves;
	if (made->name) {
		pthread_rwlock_wrlock(&names);
		enter_name(made);
		enter_native(made);
		pthread_rwlock_unlock(&names);
	}
	append(made);
	return true;
}

bool mpsd_made_add(struct mpsd_made *record, uint64_t moves)
{
	bool is;

	mpsd_made_lock();
	is = add(record, moves);
	mpsd_made_unlock();
	return is;
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

static void forget(struct mpsd_made *made)
{
	if (made->name) {
		pthread_rwlock_wrlock(&names);
		strike_name(made);
		strike_native(made);
		pthread_rwlock_unlock(&names);
	}
	*(made->older ? &made->older->newer : &oldest) = made->newer;
	*(made->newer ? &made->newer->older : &newest) = made->older;
	if (!made->is_twin)
		atomic_fetch_sub(&mpsd_made_waiting, 1);
	if (made->kind == MPSD_MADE_VARIABLE)
		mpsd_variable_forget(made->name);
	mpsd_spare_give(made->name);
	mpsd_image_free(made->image);
	mpsd_graph_let_go(made->graph);
	mpsd_link_free(made->link);
	free(made->put.nodes);
	free(made->twin_put.nodes);
	free(made->text);
	free(made->attribute);
	free(made);
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

static bool is_same(const struct mpsd_made *one, const struct mpsd_made *other)
{
	return one->value == other->value && one->size == other->size &&
	       (!one->attribute || !memcmp(one->attribute, other->attribute, sizeof(*one->attribute)));
}

static bool is_same_setting(const struct mpsd_made *one, const struct mpsd_made *other)
{
	return one->kind == other->kind && one->of == other->of && one->what == other->what &&
	       one->device == other->device;
}

bool mpsd_made_set(struct mpsd_made *record, uint64_t moves)
{
	struct mpsd_made *made, *next;
	bool is, same = false;

	mpsd_made_lock();
	while ((made = mpsd_made_held()) && is_same_setting(made, record))
		mpsd_made_wait();
	is = atomic_load(&mpsd_moves) == moves;
	for (made = is ? oldest : NULL; made; made = next) {
		next = made->newer;
		if (!is_same_setting(made, record))
			continue;
		same = is_same(made, record);
		if (same)
			break;
		forget(made);
	}
	if (same)
		free(record->attribute);
	is = is && (same || add(record, moves));
	mpsd_made_unlock();
	return is;
}

static bool is_of(const struct mpsd_made *made, const struct mpsd_made *ancestor)
{
	while (made && made != ancestor)
		made = made->of;
	return made != NULL;
}

bool mpsd_made_end(const void *name, uint64_t moves)
{
	struct mpsd_made *made, *ended, *older;
	bool is;

	mpsd_made_lock();
	do {
		is = atomic_load(&mpsd_moves) == moves;
		ended = is ? mpsd_made_find(name) : NULL;
	} while ((is_of(mpsd_made_held(), ended) || mpsd_ahead_needs(mpsd_made_held(), ended)) && mpsd_made_wait());
	/* What is of it is newer. */
	for (made = ended ? newest : NULL; made; made = older) {
		older = made == ended ? NULL : made->older;
		if (is_of(made, ended)) {
			mpsd_twin_end(made);
			forget(made);
		}
	}
	mpsd_made_unlock();
	return is;
}

CUresult mpsd_made_ended(CUresult result, uint64_t moves)
{
	if (atomic_load(&mpsd_moves) != moves)
		return CUDA_SUCCESS;
	if (!mpsd_is_loss(result) || !mpsd_line_ready())
		return result;
	mpsd_line_error(result, moves);
	return CUDA_SUCCESS;
}

bool mpsd_made_waits(void)
{
	return atomic_load(&mpsd_made_waiting) != 0;
}

void mpsd_made_move(void)
{
	pthread_rwlock_wrlock(&names);
	natives_of_moves = mpsd_moves_done() + 2;
	for (unsigned int i = 0; i < BUCKETS; i++)
		by_native[i] = NULL;
	for (struct mpsd_made *made = oldest; made; made = made->newer) {
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

struct mpsd_made *mpsd_made_context(CUdevice device)
{
	struct mpsd_made *made = oldest;

	while (made && (made->kind != MPSD_MADE_CONTEXT || made->device != device))
		made = made->newer;
	return made;
}

struct mpsd_made *mpsd_made_oldest(void)
{
	return oldest;
}
