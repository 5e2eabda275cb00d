// SPDX-License-Identifier: MIT
#include "failover/unmapping.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "clock.h"
#include "exact/exact.h"
#include "failover/carry.h"
#include "failover/fence.h"
#include "failover/spins.h"
#include "failover/undoroom.h"
#include "failover/vmm.h"
#include "failoverwire.h"
#include "thread.h"
#include "windows.h"

static atomic_uint lasting;

bool mpsd_unmapping_lasts(void)
{
	return atomic_load(&lasting) != 0;
}

bool mpsd_unmapping_await(int milliseconds)
{
	bool lasted = mpsd_unmapping_lasts();

	for (int ms = 0; mpsd_unmapping_lasts() && ms < milliseconds; ms++)
		mpsd_pause(1);
	return lasted && !mpsd_unmapping_lasts();
}

void mpsd_unmapping_child(void)
{
	atomic_store(&lasting, 0);
}

void mpsd_unmapping_let_go(struct mpsd_unmapping *unmapping)
{
	if (atomic_fetch_sub(&unmapping->holders, 1) > 1)
		return;
	close(unmapping->ended);
	mpsd_cut_discard(unmapping->cut);
	free(unmapping->handles);
	free(unmapping);
}

/* Where the copy's way has been cut off already nothing is proven by this. */
static bool is_gone(const struct mpsd_unmapping *unmapping, unsigned int piece)
{
	return unmapping->cut && mpsd_cut_is_gone(unmapping->cut, piece);
}

/* In this order, and who makes the gate known looks afterwards: one of the two opens it. */
void mpsd_unmapping_open_gate(struct mpsd_unmapping *unmapping)
{
	uint32_t *gate = atomic_load(&unmapping->gate);

	if (gate && atomic_load(&unmapping->verdict) != MPSD_FENCE_UNDECIDED)
		__atomic_store_n(gate, MPSD_GATE_IS_OPEN, __ATOMIC_RELEASE);
}

void mpsd_unmapping_decide(struct mpsd_unmapping *unmapping, enum mpsd_verdict verdict)
{
	unsigned int none = MPSD_FENCE_UNDECIDED;

	/* Once: later the word may be another move's gate. */
	if (!atomic_compare_exchange_strong(&unmapping->verdict, &none, verdict))
		return;
	atomic_store(&unmapping->decided_ns, mpsd_now_ns());
	mpsd_unmapping_open_gate(unmapping);
}

bool mpsd_fence_is_said(int line, uint64_t generation)
{
	struct mpsd_failover_message said;

	if (recv(line, &said, sizeof(said), MSG_PEEK | MSG_DONTWAIT) != (ssize_t)sizeof(said) ||
	    said.magic != MPSD_FAILOVER_MAGIC || said.version != MPSD_FAILOVER_VERSION ||
	    said.kind != MPSD_FAILOVER_FENCED || said.generation != generation)
		return false;
	return recv(line, &said, sizeof(said), MSG_DONTWAIT) == (ssize_t)sizeof(said);
}

/* One at a time: when the word is taken what comes after it would be taken by whoever has only seen it. */
void mpsd_unmapping_hear(struct mpsd_unmapping *unmapping)
{
	pthread_mutex_lock(&unmapping->hearing);
	if (unmapping->line >= 0 && unmapping->may_be_told &&
	    mpsd_fence_is_said(unmapping->line, unmapping->generation)) {
		atomic_store(&unmapping->is_told, true);
		mpsd_unmapping_decide(unmapping, MPSD_FENCE_HOLDS);
	}
	pthread_mutex_unlock(&unmapping->hearing);
}

void mpsd_unmapping_hear_no_more(struct mpsd_unmapping *unmapping)
{
	pthread_mutex_lock(&unmapping->hearing);
	unmapping->line = -1;
	pthread_mutex_unlock(&unmapping->hearing);
}

void mpsd_unmapping_do(struct mpsd_unmapping *unmapping)
{
	/* Not while another thread is at the same piece. */
	if (unmapping->cut)
		mpsd_cut_end(unmapping->cut);
	for (unsigned int i = 0; i < unmapping->count; i++) {
		struct arena_range piece = unmapping->pieces[i];

		if (unmapping->unmap(piece.base, piece.size) != CUDA_SUCCESS && !is_gone(unmapping, i))
			atomic_store(&unmapping->all, false);
		/* The driver may have been at it for long; and what has been said by then holds, whatever it refuses. */
		mpsd_unmapping_hear(unmapping);
	}
	for (size_t i = 0; i < unmapping->handle_count; i++)
		unmapping->release(unmapping->handles[i]);
}

/* The mover and who cuts need the processors, where it is not this that the mover waits for: others' programs move, too. */
static bool cut_the_others(struct mpsd_unmapping *unmapping)
{
	enum mpsd_cut_state state = MPSD_CUT_FAILED;
	uint64_t began = mpsd_now_ns();
	bool spins = unmapping->is_ahead && mpsd_fence_spins();

	while (unmapping->goes_on && (state = mpsd_cut_look(unmapping->cut)) == MPSD_CUT_GOES_ON) {
		bool is_enough = mpsd_cut_is_enough(unmapping->cut);

		if (is_enough)
			mpsd_unmapping_decide(unmapping, MPSD_FENCE_HOLDS);
		mpsd_unmapping_hear(unmapping);
		mpsd_fence_rest(began, spins && !is_enough && !atomic_load(&unmapping->decided_ns));
	}
	if (unmapping->goes_on && mpsd_cut_is_enough(unmapping->cut))
		mpsd_unmapping_decide(unmapping, MPSD_FENCE_HOLDS);
	return state == MPSD_CUT_DONE;
}

static void *run(void *argument)
{
	struct mpsd_unmapping *unmapping = argument;
	bool is_cut = cut_the_others(unmapping);
	uint64_t one = 1;

	if (is_cut)
		mpsd_undoroom_open(unmapping->moves);
	atomic_store(&unmapping->is_behind, is_cut);
	mpsd_unmapping_do(unmapping);
	if (atomic_load(&unmapping->all))
		mpsd_undoroom_open(unmapping->moves);
	mpsd_unmapping_decide(unmapping, atomic_load(&unmapping->all) ? MPSD_FENCE_HOLDS : MPSD_FENCE_BROKEN);
	atomic_store(&unmapping->is_through, true);
	atomic_store(&unmapping->is_behind, true);
	while (write(unmapping->ended, &one, sizeof(one)) < 0 && errno == EINTR)
		;
	/* The copy may be unloaded from here on. */
	atomic_fetch_sub(mpsd_inside_of(unmapping->moves), 1);
	atomic_fetch_sub(&lasting, 1);
	mpsd_unmapping_let_go(unmapping);
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

static void gather(struct mpsd_unmapping *unmapping)
{
	for (int i = 0; i < DEVICES; i++) {
		struct window *window = &mpsd_windows[i];
		struct arena_range piece = { window->arena.base, 0 };

		while (window->open && arena_next_piece(&window->arena, piece.base + piece.size, &piece))
			unmapping->pieces[unmapping->count++] = piece;
	}
}

struct mpsd_unmapping *mpsd_unmapping_prepare(uint64_t generation)
{
	struct mpsd_unmapping *unmapping = malloc(sizeof(*unmapping) + most_pieces() * sizeof(unmapping->pieces[0]));

	if (!unmapping)
		return NULL;
	*unmapping = (struct mpsd_unmapping){
		.unmap = (__typeof__(unmapping->unmap))mpsd_tables()->real[MPSD_cuMemUnmap],
		.release = (__typeof__(unmapping->release))mpsd_tables()->real[MPSD_cuMemRelease],
		.moves = mpsd_moves_done(),
		.generation = generation,
		.ended = eventfd(0, EFD_CLOEXEC),
		.all = true,
		.holders = 1,
		.hearing = PTHREAD_MUTEX_INITIALIZER,
		.line = -1,
	};
	gather(unmapping);
	unmapping->first = mpsd_exact_room_last(unmapping->pieces, unmapping->count);
	unmapping->handles = mpsd_vmm_take(&unmapping->handle_count);
	return unmapping;
}

bool mpsd_unmapping_start(struct mpsd_unmapping *unmapping)
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
