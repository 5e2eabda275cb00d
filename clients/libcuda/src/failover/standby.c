// SPDX-License-Identifier: MIT
/*
 * The copies of the driver: the one in use, the standby's, and the one that was left. A lazy standby is one that is
 * offered and not made before a move into it comes: until then it costs a descriptor for each piece of memory.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "debug.h"
#include "failover/ahead.h"
#include "failover/autopsy.h"
#include "failover/blame.h"
#include "failover/carry.h"
#include "failover/copy.h"
#include "failover/line.h"
#include "failover/made.h"
#include "failover/mirror.h"
#include "failover/move.h"
#include "failover/rehearsal.h"
#include "failover/remains.h"
#include "failover/wish.h"
#include "failoverwire.h"
#include "windows.h"
#include "zones.h"

#define MOST_LEAVE_MS 1000
#define AHEAD_NS 300000000ull	/* what is made for a standby that the daemon waits for */
#define RETRY_NS 100000000ull
#define SETTLE_MS 1000		/* threads come into the next copy, for which they may need the loader, first */
#define FIRST_SETTLES 5

void *mpsd_other[MPSD_SLOTS];

/* in_use has no handle while it is the program's first one, which is never unloaded. */
static struct mpsd_copy in_use, standby;
static atomic_uint in_use_number;	/* of in_use, for threads of the driver */

/* Those that were, until nobody is inside; the oldest first. */
#define MOST_LEFT (MPSD_COPY_NUMBERS - 2)
static struct left {
	struct mpsd_copy copy;
	uint64_t moves, ns;
} lefts[MOST_LEFT];

/* The program's first copy: without a handle. `ns` 0: it is in use, or what it has on the GPU was given back. */
static struct left first;
static unsigned int forgotten;	/* of those that were left */

static atomic_bool is_lazy;	/* by the daemon's configuration */

/* Of a lazy standby that is offered; generation 0: there is none. */
static struct {
	uint64_t generation;
	char pipe[MPSD_FAILOVER_PATH_ROOM], folder[MPSD_FAILOVER_TEXT_ROOM];
} offer;

static void fill(void **table, void *const *with)
{
	for (unsigned int i = 0; i < MPSD_SLOTS; i++)
		__atomic_store_n(&table[i], with ? with[i] : NULL, __ATOMIC_RELEASE);
}

void mpsd_standby_no_calls(void)
{
	fill(mpsd_other, NULL);
}

static bool same_version(void)
{
	int ours = 0, theirs = 0;

	return real_cuDriverGetVersion(&ours) == CUDA_SUCCESS && other_cuDriverGetVersion(&theirs) == CUDA_SUCCESS &&
	       ours == theirs;
}

/* Its contexts, whatever the program has by now, or how that which was to become one ended. */
static void end_copy(struct mpsd_copy *copy)
{
	__typeof__(&cuDevicePrimaryCtxGetState) state;
	__typeof__(&cuDevicePrimaryCtxReset) reset;

	state = (__typeof__(state))copy->calls[MPSD_cuDevicePrimaryCtxGetState];
	reset = (__typeof__(reset))copy->calls[MPSD_cuDevicePrimaryCtxReset_v2];
	for (int i = 0; copy->handle && i < DEVICES; i++) {
		unsigned int flags;
		int active = 0;

		if (state(i, &flags, &active) != CUDA_SUCCESS || active)
			reset(i);
	}
	mpsd_copy_unload(copy);
}

static uint64_t due_ns(const struct left *left)
{
	uint64_t settle_ns = 1000000 * mpsd_debug_number(MPSD_DEBUG_SETTLE_MS, SETTLE_MS, 1, 0, 60000);

	/* Who is inside the first copy is not counted: it has longer to come out. */
	return left->ns + settle_ns * (left->copy.handle ? 1 : FIRST_SETTLES);
}

static int in_ms(uint64_t soonest)
{
	uint64_t now = mpsd_now_ns();

	if (soonest == UINT64_MAX)
		return -1;
	return now < soonest ? (int)((soonest - now) / 1000000) + 1 : 0;
}

/* When the next of those is due that can be unloaded. */
static uint64_t soonest_left(void)
{
	uint64_t soonest = UINT64_MAX;

	for (int i = 0; i < MOST_LEFT && lefts[i].copy.handle; i++)
		if (due_ns(&lefts[i]) < soonest)
			soonest = due_ns(&lefts[i]);
	return soonest;
}

/* Until what was left is to be looked after; -1: there is nothing. */
int mpsd_left_ms(void)
{
	uint64_t soonest = soonest_left();

	if (first.ns && due_ns(&first) < soonest)
		soonest = due_ns(&first);
	return in_ms(soonest);
}

static bool is_empty(const struct left *left)
{
	return !atomic_load(mpsd_inside_of(left->moves));
}

static void forget(int number)
{
	struct left left = lefts[number];

	for (int i = number; i + 1 < MOST_LEFT; i++)
		lefts[i] = lefts[i + 1];
	lefts[MOST_LEFT - 1] = (struct left){ .ns = 0 };
	forgotten++;
	mpsd_left_tell(false);	/* before the next copy can have its pages there */
	end_copy(&left.copy);
	mpsd_hosts_copy_went(left.moves);
}

unsigned int mpsd_left_changes(void)
{
	return (unsigned int)(mpsd_moves_done() >> 1) + forgotten;
}

unsigned int mpsd_left_numbers(unsigned int *numbers)
{
	unsigned int count = mpsd_moves_done() != 0;

	numbers[0] = 0;
	for (int i = 0; i < MOST_LEFT && lefts[i].copy.handle; i++)
		numbers[count++] = lefts[i].copy.number;
	return count;
}

static void tend_first(uint64_t now)
{
	if (!first.ns || now < due_ns(&first))
		return;
	if (is_empty(&first) && mpsd_remains_end())
		first.ns = 0;
	else
		first.ns += RETRY_NS;
}

/* One of them, and the others when they are looked at again. */
void mpsd_standby_tend(void)
{
	uint64_t now = mpsd_now_ns();

	tend_first(now);
	for (int i = 0; i < MOST_LEFT && lefts[i].copy.handle; i++) {
		if (now < due_ns(&lefts[i]))
			continue;
		if (is_empty(&lefts[i])) {
			forget(i);
			return;
		}
		lefts[i].ns += RETRY_NS;
	}
}

/*
 * The oldest in which nobody is; -1: there is none. Nobody gets on where the program's own context is lost meanwhile: what
 * it waits for is the next one, whether a copy is due or not.
 */
static int find_empty(void)
{
	bool is_urgent = mpsd_own_error_met();
	uint64_t now = mpsd_now_ns();

	for (int i = 0; i < MOST_LEFT && lefts[i].copy.handle; i++)
		if (is_empty(&lefts[i]) && (is_urgent || now >= due_ns(&lefts[i])))
			return i;
	return -1;
}

/* The end of what one has on the GPU, then of it, once nobody is inside. False: there is none, or somebody is. */
static bool end_left(void)
{
	int number;

	while (in_ms(soonest_left()) > 0 && !mpsd_own_error_met())
		mpsd_pause(1);
	for (int ms = 0; (number = find_empty()) < 0 && lefts[0].copy.handle && ms < MOST_LEAVE_MS; ms++)
		mpsd_pause(1);
	if (number < 0)
		return false;
	forget(number);
	return true;
}

static bool start_copy(uint64_t generation, const char *pipe, const char **why)
{
	bool is;

	fill(mpsd_other, standby.calls);
	mpsd_copy_pipe(pipe, generation);
	*why = "cuInit of the second driver instance";
	is = other_cuInit(0) == CUDA_SUCCESS && same_version() && mpsd_made_twins(why);
	mpsd_copy_pipe(NULL, 0);
	return is;
}

static bool open_once(uint64_t generation, const char *pipe, const char *folder, const char **why)
{
	uint64_t until;
	bool is;

	mpsd_standby_close();
	mpsd_zones_copy(MPSD_RANGE_COPY_COMES);
	is = mpsd_copy_load(&standby, folder, why);
	mpsd_line_ends_first();
	is = is && start_copy(generation, pipe, why);
	mpsd_line_ends_first();
	pthread_mutex_lock(&mpsd_windows_lock);
	mpsd_zones_copy(MPSD_RANGE_COPY_IS_THERE);
	is = is && mpsd_mirror_begin(why);
	pthread_mutex_unlock(&mpsd_windows_lock);
	/* What is left then is made when the daemon knows of this one (mpsd_standby_follow()). */
	until = mpsd_now_ns() + AHEAD_NS;
	while (is && mpsd_now_ns() < until && (is = mpsd_made_twins(why)) && mpsd_ahead_make())
		;
	if (is && !(atomic_load(&mpsd_moves) & 1))
		mpsd_rehearse();
	mpsd_line_wake();
	if (!is)
		mpsd_standby_close();
	return is;
}

/*
 * Once more, for a window may just have come when the copy looked for what is taken; and when a copy that was left has
 * gone, in whose place, or memory, the next one comes.
 */
static bool open_now(uint64_t generation, const char *pipe, const char *folder, const char **why)
{
	bool is = open_once(generation, pipe, folder, why) || open_once(generation, pipe, folder, why);

	while (!is && end_left())
		is = open_once(generation, pipe, folder, why);
	return is;
}

static bool would_fit(const char *folder, const char **why)
{
	bool is = mpsd_copy_load(&standby, folder, why);

	if (!is)
		return false;
	fill(mpsd_other, standby.calls);
	is = same_version();
	mpsd_standby_no_calls();
	mpsd_copy_unload(&standby);
	*why = "the second driver instance has another driver version";
	return is;
}

void mpsd_standby_lazy(bool is)
{
	atomic_store(&is_lazy, is);
}

bool mpsd_standby_is_lazy(void)
{
	enum mpsd_wish_mirror mirror = mpsd_wish()->mirror;

	return mirror == MPSD_WISH_LAZY || (mirror == MPSD_WISH_ANY && atomic_load(&is_lazy));
}

bool mpsd_standby_offer(uint64_t generation, const char *pipe, const char *folder, const char **why)
{
	bool is;

	mpsd_blame_prepare();
	/* A lazy standby is made when the first one is lost already. */
	if (!mpsd_standby_is_lazy())
		return open_now(generation, pipe, folder, why);
	mpsd_standby_close();
	while (!(is = would_fit(folder, why)) && end_left())
		;
	if (!is)
		return false;
	pthread_mutex_lock(&mpsd_windows_lock);
	is = mpsd_mirror_keep(why);
	pthread_mutex_unlock(&mpsd_windows_lock);
	offer.generation = is ? generation : 0;
	strcpy(offer.pipe, pipe);
	strcpy(offer.folder, folder);
	return is;
}

bool mpsd_standby_come(const char **why)
{
	__typeof__(offer) one = offer;

	return standby.handle || open_now(one.generation, one.pipe, one.folder, why);
}

void *mpsd_standby_handle(void)
{
	return standby.handle;
}

void mpsd_standby_leave(bool is)
{
	mpsd_autopsy_left(in_use.number, is);
}

unsigned int mpsd_in_use_number(void)
{
	return atomic_load(&in_use_number);
}

void mpsd_standby_used(void)
{
	struct left left = { in_use, mpsd_moves_done(), mpsd_now_ns() };

	if (!left.copy.handle)
		first = left;
	for (int i = 0; left.copy.handle && i < MOST_LEFT; i++) {
		if (lefts[i].copy.handle)
			continue;
		lefts[i] = left;
		break;
	}
	in_use = standby;
	atomic_store(&in_use_number, in_use.number);
	standby = (struct mpsd_copy){ .handle = NULL };
	offer.generation = 0;
}

bool mpsd_standby_follow(const char **why)
{
	const char *fault;

	if (standby.handle && !mpsd_made_twins(why))
		return false;
	pthread_mutex_lock(&mpsd_windows_lock);
	fault = mpsd_mirror_fault();
	pthread_mutex_unlock(&mpsd_windows_lock);
	if (fault)
		*why = fault;
	if (!fault && standby.handle && !(atomic_load(&mpsd_moves) & 1))
		mpsd_rehearse_code();
	/* One at a time: a move may come. */
	if (!fault && standby.handle && mpsd_ahead_make())
		mpsd_line_wake();
	return !fault;
}

void mpsd_standby_close(void)
{
	if (offer.generation) {
		pthread_mutex_lock(&mpsd_windows_lock);
		mpsd_mirror_keep_end();
		pthread_mutex_unlock(&mpsd_windows_lock);
	}
	offer.generation = 0;
	if (!standby.handle)
		return;
	pthread_mutex_lock(&mpsd_windows_lock);
	mpsd_mirror_end(true);
	mpsd_zones_copy(MPSD_RANGE_COPY_WENT);
	pthread_mutex_unlock(&mpsd_windows_lock);
	mpsd_made_no_twins();
	mpsd_standby_no_calls();
	end_copy(&standby);
}

