// SPDX-License-Identifier: MIT
#include "failover/fence.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "clock.h"
#include "exact/exact.h"
#include "failover/carry.h"
#include "failover/cut.h"
#include "failover/move.h"
#include "failover/vmm.h"
#include "failoverwire.h"
#include "thread.h"
#include "windows.h"

#define END_MS 2000
#define LOOK_NS 30000
#define ROOM_NS 2000000000ull	/* then a program goes on without room for copies */
#define PATIENT_NS 5000000ull	/* from then on it sleeps between its looks: others of its domain move, too */

struct unmapping {
	__typeof__(&cuMemUnmap) unmap;	/* the left copy's, and the next one */
	__typeof__(&cuMemRelease) release;
	uint64_t moves;			/* its number */
	uint64_t generation;		/* of the next one: that of the daemon's word */
	int ended;			/* eventfd */
	atomic_bool all;		/* that was tried is unmapped */
	atomic_bool is_through;		/* all was tried: what the old copy did in it came before */
	atomic_bool is_behind;		/* the old copy comes into none of the pieces any more, or all was tried */
	atomic_int holders;		/* its thread, and whoever waits for it */
	struct mpsd_cut *cut;		/* before it; NULL: there was none */
	bool goes_on;			/* that is not through: the mover has not waited for all of it */
	bool may_be_told;		/* the end of kernels is the end of all that may come into the rest */
	bool is_told;			/* so it was */
	CUmemGenericAllocationHandle *handles;	/* of the program's own memory, which lasts as long as the last one */
	size_t handle_count;
	unsigned int count, first;	/* pieces; the first ones are the program's */
	struct arena_range pieces[];
};

static atomic_uint lasting;
static struct unmapping *unfinished;	/* the mover's */
static MPSD_READ_OFTEN atomic_uint_least64_t shut_of;	/* 1 + the number of who may write to the room; 0: it is open */
static atomic_uint_least64_t awaited_since_ns;		/* 0: nobody does */
static atomic_bool ends;				/* the program: nothing is waited for */
static int line = -1;
static uint64_t generation;

void mpsd_fence_listen(int fd, uint64_t number)
{
	line = fd;
	generation = number;
}

bool mpsd_fence_lasts(void)
{
	return atomic_load(&lasting) != 0;
}

bool mpsd_fence_await(int milliseconds)
{
	bool lasted = mpsd_fence_lasts();

	for (int ms = 0; mpsd_fence_lasts() && ms < milliseconds; ms++)
		mpsd_pause(1);
	return lasted && !mpsd_fence_lasts();
}

void mpsd_fence_at_end(void)
{
	static uint64_t until_ns;
	uint64_t now = mpsd_now_ns();

	if (!until_ns)
		until_ns = now + END_MS * 1000000ull;
	if (now < until_ns)
		mpsd_fence_await((int)((until_ns - now) / 1000000) + 1);
}

void mpsd_fence_child(void)
{
	atomic_store(&lasting, 0);
	atomic_store(&shut_of, 0);
	unfinished = NULL;
}

static void shut_room(const struct unmapping *unmapping)
{
	atomic_store(&awaited_since_ns, 0);
	atomic_store(&shut_of, 1 + unmapping->moves);
}

/* Where it is shut for this one. */
static void open_room(const struct unmapping *unmapping)
{
	uint64_t own = 1 + unmapping->moves;

	atomic_compare_exchange_strong(&shut_of, &own, 0);
}

static void let_go(struct unmapping *unmapping)
{
	if (atomic_fetch_sub(&unmapping->holders, 1) > 1)
		return;
	close(unmapping->ended);
	mpsd_cut_discard(unmapping->cut);
	free(unmapping->handles);
	free(unmapping);
}

/* Where the copy's way has been cut off already nothing is proven by this. */
static bool is_gone(const struct unmapping *unmapping, unsigned int piece)
{
	return unmapping->cut && mpsd_cut_is_gone(unmapping->cut, piece);
}

static void unmap_all(struct unmapping *unmapping)
{
	/* Not while another thread is at the same piece. */
	if (unmapping->cut)
		mpsd_cut_end(unmapping->cut);
	for (unsigned int i = 0; i < unmapping->count; i++) {
		struct arena_range piece = unmapping->pieces[i];

		if (unmapping->unmap(piece.base, piece.size) != CUDA_SUCCESS && !is_gone(unmapping, i))
			atomic_store(&unmapping->all, false);
	}
	for (size_t i = 0; i < unmapping->handle_count; i++)
		unmapping->release(unmapping->handles[i]);
}

/* The mover and who cuts need the processors: others' programs move, too. */
static bool cut_the_others(struct unmapping *unmapping)
{
	enum mpsd_cut_state state = MPSD_CUT_FAILED;

	while (unmapping->goes_on && (state = mpsd_cut_look(unmapping->cut)) == MPSD_CUT_GOES_ON)
		usleep(LOOK_NS / 1000);
	return state == MPSD_CUT_DONE;
}

static void *run(void *argument)
{
	struct unmapping *unmapping = argument;
	bool is_cut = cut_the_others(unmapping);
	uint64_t one = 1;

	if (is_cut)
		open_room(unmapping);
	atomic_store(&unmapping->is_behind, is_cut);
	unmap_all(unmapping);
	if (atomic_load(&unmapping->all))
		open_room(unmapping);
	atomic_store(&unmapping->is_through, true);
	atomic_store(&unmapping->is_behind, true);
	while (write(unmapping->ended, &one, sizeof(one)) < 0 && errno == EINTR)
		;
	/* The copy may be unloaded from here on. */
	atomic_fetch_sub(mpsd_inside_of(unmapping->moves), 1);
	atomic_fetch_sub(&lasting, 1);
	let_go(unmapping);
	return NULL;
}

/* Every piece that is there has its granules, so there are no more than that. */
static unsigned int most_pieces(void)
{
	unsigned int most = 0;

	for (int i = 0; i < DEVICES; i++)
		most += mpsd_windows[i].open ? mpsd_windows[i].arena.pieces : 0;
	return most;
}

static void gather(struct unmapping *unmapping)
{
	for (int i = 0; i < DEVICES; i++) {
		struct window *window = &mpsd_windows[i];
		struct arena_range piece = { window->arena.base, 0 };

		while (window->open && arena_next_piece(&window->arena, piece.base + piece.size, &piece))
			unmapping->pieces[unmapping->count++] = piece;
	}
}

static struct unmapping *prepare(void)
{
	struct unmapping *unmapping = malloc(sizeof(*unmapping) + most_pieces() * sizeof(unmapping->pieces[0]));

	if (!unmapping)
		return NULL;
	*unmapping = (struct unmapping){
		.unmap = (__typeof__(unmapping->unmap))mpsd_tables()->real[MPSD_cuMemUnmap],
		.release = (__typeof__(unmapping->release))mpsd_tables()->real[MPSD_cuMemRelease],
		.moves = mpsd_moves_done(),
		.generation = generation,
		.ended = eventfd(0, EFD_CLOEXEC),
		.all = true,
		.holders = 1,
	};
	gather(unmapping);
	unmapping->first = mpsd_exact_room_last(unmapping->pieces, unmapping->count);
	unmapping->handles = mpsd_vmm_take(&unmapping->handle_count);
	return unmapping;
}

static bool start(struct unmapping *unmapping)
{
	if (unmapping->ended < 0)
		return false;
	atomic_store(&unmapping->holders, 2);
	atomic_fetch_add(mpsd_inside_of(unmapping->moves), 1);
	atomic_fetch_add(&lasting, 1);
	if (mpsd_thread_start(run, unmapping))
		return true;
	atomic_fetch_sub(mpsd_inside_of(unmapping->moves), 1);
	atomic_fetch_sub(&lasting, 1);
	atomic_store(&unmapping->holders, 1);
	return false;
}

static bool is_said(uint64_t number)
{
	struct mpsd_failover_message said;

	if (recv(line, &said, sizeof(said), MSG_PEEK | MSG_DONTWAIT) != (ssize_t)sizeof(said) ||
	    said.magic != MPSD_FAILOVER_MAGIC || said.version != MPSD_FAILOVER_VERSION ||
	    said.kind != MPSD_FAILOVER_FENCED || said.generation != number)
		return false;
	return recv(line, &said, sizeof(said), MSG_DONTWAIT) == (ssize_t)sizeof(said);
}

static bool wait_for(struct unmapping *unmapping)
{
	struct pollfd polled[2] = { { .fd = unmapping->ended, .events = POLLIN }, { .fd = line, .events = POLLIN } };

	for (;;) {
		if (poll(polled, 2, -1) < 0)
			continue;
		if (polled[0].revents)
			return atomic_load(&unmapping->is_through) && atomic_load(&unmapping->all);
		/* What that says is the end of kernels. */
		if (polled[1].revents && is_said(generation) && mpsd_exact_close())
			return true;
		/* Or something else comes first: it is obeyed after the move. */
		if (polled[1].revents)
			polled[1].fd = -1;
	}
}

static bool has_processors(void)
{
	cpu_set_t may;

	return !sched_getaffinity(0, sizeof(may), &may) && CPU_COUNT(&may) > 1;
}

/*
 * Who sleeps may get a processor back some ms later only: others' threads spin in the resource manager meanwhile. Where
 * there is but one, it is those that are waited for that need it.
 */
static void rest(uint64_t began, bool spins)
{
	uint64_t now = mpsd_now_ns();

	if (!spins || now - began > PATIENT_NS)
		usleep(LOOK_NS / 1000);
	else
		while (mpsd_now_ns() - now < LOOK_NS)
			;
}

/* True, or the daemon says that it need not be. */
static bool cut_off(struct unmapping *unmapping)
{
	enum mpsd_cut_state state = MPSD_CUT_FAILED;
	uint64_t began = mpsd_now_ns();
	bool spins = has_processors();

	unmapping->cut = mpsd_cut_begin(mpsd_in_use_number(), unmapping->pieces, unmapping->count, unmapping->first);
	while (unmapping->cut) {
		state = mpsd_cut_look(unmapping->cut);
		unmapping->goes_on = state != MPSD_CUT_DONE && unmapping->first < unmapping->count &&
				     mpsd_cut_is_enough(unmapping->cut);
		if (state != MPSD_CUT_GOES_ON || unmapping->goes_on || (is_said(generation) && mpsd_exact_close()))
			break;
		rest(began, spins);
	}
	return state != MPSD_CUT_FAILED || unmapping->goes_on;
}

bool mpsd_fence(void)
{
	struct unmapping *unmapping = prepare();
	bool is;

	if (!unmapping)
		return false;
	is = mpsd_exact_is_over() || cut_off(unmapping);
	if (unmapping->goes_on)
		shut_room(unmapping);
	if (start(unmapping)) {
		is = is || wait_for(unmapping);
	} else {
		unmap_all(unmapping);
		is = (is && !unmapping->goes_on) || atomic_load(&unmapping->all);
		unmapping->goes_on = false;
		open_room(unmapping);
	}
	if (!unmapping->goes_on) {
		let_go(unmapping);
		return is;
	}
	/* What is in flight is known now alone: what is done again goes by the same records. */
	unmapping->may_be_told = mpsd_exact_close();
	unfinished = unmapping;
	return is;
}

void mpsd_fence_finish(void)
{
	if (!unfinished)
		return;
	while (!atomic_load(&unfinished->is_behind) && !unfinished->is_told) {
		if (atomic_load(&ends))
			return;
		if (is_said(unfinished->generation))
			mpsd_fence_told(unfinished->generation);
		else
			usleep(LOOK_NS / 1000);
	}
	if (!unfinished->is_told && atomic_load(&unfinished->is_through) && !atomic_load(&unfinished->all))
		mpsd_exact_lose_room();
	open_room(unfinished);
	let_go(unfinished);
	unfinished = NULL;
}

bool mpsd_fence_is_unfinished(void)
{
	return unfinished != NULL;
}

void mpsd_fence_told(uint64_t number)
{
	if (!unfinished || unfinished->generation != number || !unfinished->may_be_told)
		return;
	unfinished->is_told = true;
	open_room(unfinished);
}

bool mpsd_fence_hears(void)
{
	bool is = is_said(generation);

	if (is)
		mpsd_fence_told(generation);
	return is;
}

void mpsd_fence_leave_off(void)
{
	atomic_store(&ends, true);
}

bool mpsd_fence_has_room(void)
{
	return !atomic_load(&shut_of);
}

CUresult mpsd_fence_await_room(void)
{
	uint64_t moves = mpsd_tables()->moves;

	while (atomic_load(&shut_of)) {
		uint64_t now = mpsd_now_ns(), since = 0;

		if (atomic_load(&mpsd_moves) != moves)
			return MPSD_AGAIN;
		if (atomic_load(&ends))
			return CUDA_ERROR_OUT_OF_MEMORY;
		/* One after the other, all wait no longer than that. */
		if (!atomic_compare_exchange_strong(&awaited_since_ns, &since, now) && now > since + ROOM_NS)
			return CUDA_ERROR_OUT_OF_MEMORY;
		usleep(LOOK_NS / 1000);
	}
	return CUDA_SUCCESS;
}
