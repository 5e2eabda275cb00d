// SPDX-License-Identifier: MIT
/* The records, found by the program's names and by the driver's. */
#include <pthread.h>
#include <stdlib.h>

#include "failover/graph.h"
#include "failover/line.h"
#include "failover/made.h"

#define BUCKETS 4096

/*
 * Who makes and ends records, and twins, has `lock`; who changes the buckets or what they lead to has `names` too, for
 * writing; who looks a name up has that alone, for a twin may take long.
 */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_rwlock_t names = PTHREAD_RWLOCK_INITIALIZER;
static struct mpsd_made *by_name[BUCKETS], *by_native[BUCKETS];
static struct mpsd_made *oldest, *newest;
static atomic_uint waiting;
static uint64_t natives_of_moves;

/* Names that the driver could never give: what is made after a move may get the address of an old handle. */
static char spare_names[1 << 16];
static unsigned int spare_used;

void mpsd_made_lock(void)
{
	pthread_mutex_lock(&lock);
}

void mpsd_made_unlock(void)
{
	pthread_mutex_unlock(&lock);
}

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

void *mpsd_native_of(const void *name)
{
	struct mpsd_made *made;
	void *native;

	pthread_rwlock_rdlock(&names);
	made = mpsd_made_find(name);
	native = made ? made->native : (void *)name;
	if (made && mpsd_tables()->moves != natives_of_moves)
		native = NULL;
	pthread_rwlock_unlock(&names);
	return native;
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

static void enter_native(struct mpsd_made *made)
{
	made->next_native = by_native[bucket(made->native)];
	by_native[bucket(made->native)] = made;
}

static void append(struct mpsd_made *made)
{
	made->older = newest;
	made->newer = NULL;
	*(newest ? &newest->newer : &oldest) = made;
	newest = made;
	atomic_fetch_add(&waiting, 1);
	mpsd_line_wake();
}

static bool add(struct mpsd_made *record, uint64_t moves)
{
	struct mpsd_made *made, *known = find_native(record->native);

	if (atomic_load(&mpsd_moves) != moves)
		return false;
	/* A driver answers twice with the same function. */
	if (known && known->kind == record->kind && known->of == record->of) {
		record->name = known->name;
		free(record->text);
		return true;
	}
	made = malloc(sizeof(*made));
	record->name = record->native;
	if (record->native && mpsd_made_find(record->native))
		record->name = spare_used < sizeof(spare_names) ? &spare_names[spare_used++] : NULL;
	if (!made || (record->native && !record->name)) {
		mpsd_line_opaque("more handles than there is memory or names for");
		record->name = record->native;
		free(made);
		return true;
	}
	*made = *record;
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

static void strike(struct mpsd_made **link, struct mpsd_made *made, bool by)
{
	while (*link != made)
		link = by ? &(*link)->next_name : &(*link)->next_native;
	*link = by ? made->next_name : made->next_native;
}

static void forget(struct mpsd_made *made)
{
	if (made->name) {
		pthread_rwlock_wrlock(&names);
		strike(&by_name[bucket(made->name)], made, true);
		strike(&by_native[bucket(made->native)], made, false);
		pthread_rwlock_unlock(&names);
	}
	*(made->older ? &made->older->newer : &oldest) = made->newer;
	*(made->newer ? &made->newer->older : &newest) = made->older;
	if (!made->is_twin)
		atomic_fetch_sub(&waiting, 1);
	mpsd_image_free(made->image);
	mpsd_graph_let_go(made->graph);
	free(made->text);
	free(made);
}

void mpsd_made_native(struct mpsd_made *made, void *native)
{
	pthread_rwlock_wrlock(&names);
	strike(&by_native[bucket(made->native)], made, false);
	made->native = native;
	enter_native(made);
	pthread_rwlock_unlock(&names);
}

bool mpsd_made_set(struct mpsd_made *record, uint64_t moves)
{
	struct mpsd_made *made, *next;
	bool is, same = false;

	mpsd_made_lock();
	is = atomic_load(&mpsd_moves) == moves;
	for (made = is ? oldest : NULL; made; made = next) {
		next = made->newer;
		if (made->kind != record->kind || made->of != record->of || made->what != record->what ||
		    made->device != record->device)
			continue;
		same = made->value == record->value && made->size == record->size;
		if (same)
			break;
		forget(made);
	}
	is = is && (same || add(record, moves));
	mpsd_made_unlock();
	return is;
}

/* Of the kinds that have an end of their own. The rest goes with what it is of. */
static void end_twin(const struct mpsd_made *made)
{
	struct mpsd_made *context = mpsd_made_context(made->device);

	if (!made->is_twin)
		return;
	if (context && context->is_twin)
		other_cuCtxSetCurrent(context->twin);
	switch (made->kind) {
	case MPSD_MADE_STREAM:
		other_cuStreamDestroy_v2(made->twin);
		break;
	case MPSD_MADE_EVENT:
		other_cuEventDestroy_v2(made->twin);
		break;
	case MPSD_MADE_MODULE:
		other_cuModuleUnload(made->twin);
		break;
	case MPSD_MADE_LIBRARY:
		other_cuLibraryUnload(made->twin);
		break;
	case MPSD_MADE_HOST:
		other_cuMemHostUnregister(made->name);
		break;
	default:
		break;
	}
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
	is = atomic_load(&mpsd_moves) == moves;
	ended = is ? mpsd_made_find(name) : NULL;
	/* What is of it is newer. */
	for (made = ended ? newest : NULL; made; made = older) {
		older = made == ended ? NULL : made->older;
		if (is_of(made, ended)) {
			end_twin(made);
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
	return atomic_load(&waiting) != 0;
}

/* The program retains and releases a context as it likes, and so it will do with the twin. */
static void even_out(struct mpsd_made *made)
{
	CUcontext context;

	for (; made->twin_flags < made->flags; made->twin_flags++)
		other_cuDevicePrimaryCtxRetain(&context, made->device);
	for (; made->twin_flags > made->flags && made->flags; made->twin_flags--)
		other_cuDevicePrimaryCtxRelease_v2(made->device);
}

/* The oldest that has no twin; false: `what` cannot be made. */
static bool make_one(const char **what, bool *more)
{
	struct mpsd_made *made;
	bool is = true;

	mpsd_made_lock();
	for (made = oldest; made && made->is_twin; made = made->newer)
		if (made->kind == MPSD_MADE_CONTEXT)
			even_out(made);
	*more = made != NULL;
	if (made)
		is = mpsd_twin_make(made, what);
	if (made && is) {
		made->is_twin = true;
		made->twin_flags = made->kind == MPSD_MADE_CONTEXT;
		atomic_fetch_sub(&waiting, 1);
	}
	mpsd_made_unlock();
	return is;
}

/* One at a time: what the program makes meanwhile waits for one. */
bool mpsd_made_twins(const char **what)
{
	bool more = true;

	while (more)
		if (!make_one(what, &more))
			return false;
	return true;
}

void mpsd_made_no_twins(void)
{
	mpsd_made_lock();
	for (struct mpsd_made *made = oldest; made; made = made->newer) {
		if (made->is_twin)
			atomic_fetch_add(&waiting, 1);
		made->is_twin = false;
		made->twin = NULL;
	}
	mpsd_made_unlock();
}

void mpsd_made_move(void)
{
	pthread_rwlock_wrlock(&names);
	natives_of_moves = mpsd_moves_done() + 2;
	for (unsigned int i = 0; i < BUCKETS; i++)
		by_native[i] = NULL;
	for (struct mpsd_made *made = oldest; made; made = made->newer) {
		made->native = made->twin;
		made->twin = NULL;
		made->is_twin = false;
		atomic_fetch_add(&waiting, 1);
		if (made->name)
			enter_native(made);
	}
	pthread_rwlock_unlock(&names);
}

/* In a forked child, where another thread of the parent's may have had them. */
void mpsd_made_child(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
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
