// SPDX-License-Identifier: MIT
/* The records in their order: added, put in place of others, ended. */
#include <stdlib.h>
#include <string.h>

#include "failover/ahead.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "failover/names.h"
#include "failover/spare.h"

static struct mpsd_made *oldest, *newest;
atomic_uint mpsd_made_waiting;

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
	struct mpsd_made *made, *known = mpsd_names_native(record->native);

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
	mpsd_names_enter(made);
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

/* Nobody finds it any more. */
static void detach(struct mpsd_made *made)
{
	mpsd_names_strike(made);
	*(made->older ? &made->older->newer : &oldest) = made->newer;
	*(made->newer ? &made->newer->older : &newest) = made->older;
	if (!made->is_twin)
		atomic_fetch_sub(&mpsd_made_waiting, 1);
	if (made->kind == MPSD_MADE_VARIABLE)
		made->parts = mpsd_variable_take(made->name);
}

void mpsd_put_forget(struct mpsd_put *put)
{
	free(put->nodes);
	free(put->conditions.each);
	free(put->embedded.each);
	*put = (struct mpsd_put){ .graph = NULL };
}

static void release(struct mpsd_made *made)
{
	mpsd_variable_drop(made->parts);
	mpsd_spare_give(made->name);
	mpsd_image_free(made->image);
	mpsd_graph_let_go(made->graph);
	mpsd_link_free(made->link);
	mpsd_put_forget(&made->put);
	mpsd_put_forget(&made->twin_put);
	free(made->text);
	free(made->attribute);
	free(made);
}

static void forget(struct mpsd_made *made)
{
	detach(made);
	release(made);
}

/* As if it were new, in the copy in which it was detached. */
static void attach(struct mpsd_made *made)
{
	mpsd_names_enter(made);
	if (made->kind == MPSD_MADE_VARIABLE)
		mpsd_variable_give(made->name, made->parts);
	made->parts = NULL;
	made->twin = NULL;
	append(made);
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

/* Detached by this thread until the driver has answered: what ends, then what is of it, the oldest first. */
static _Thread_local struct mpsd_made *ending;

static bool has_moved;		/* under the lock: any record is of a newer one */

bool mpsd_made_move_into(const void *name, struct mpsd_made *of)
{
	struct mpsd_made *made;

	mpsd_made_lock();
	made = mpsd_is_left() ? NULL : mpsd_made_find(name);
	if (made) {
		made->of = of;
		has_moved = true;
	}
	mpsd_made_unlock();
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
	/* What is of it is newer, but for what was moved into it. */
	for (made = ended ? newest : NULL; made; made = older) {
		older = made == ended && !has_moved ? NULL : made->older;
		if (is_of(made, ended)) {
			mpsd_twin_end(made);
			detach(made);
			made->newer = ending;
			ending = made;
		}
	}
	mpsd_made_unlock();
	return is;
}

/* Whether handles are still those of that copy. A move may be on: where it does not come about it stays in use. */
static bool settle(bool is_refused, uint64_t moves)
{
	struct mpsd_made *made;
	bool is_here;

	mpsd_made_lock();
	is_here = mpsd_names_moves() == moves;
	while ((made = ending)) {
		ending = made->newer;
		if (is_refused && is_here)
			attach(made);
		else
			release(made);
	}
	mpsd_made_unlock();
	return is_here;
}

CUresult mpsd_made_ended(CUresult result, uint64_t moves)
{
	if (!settle(result != CUDA_SUCCESS && !mpsd_is_loss(result), moves))
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
