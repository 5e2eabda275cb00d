// SPDX-License-Identifier: MIT
/* Whether the program is being moved: who waits, who tries again, which functions cannot come along. */
#include <pthread.h>

#include "clock.h"
#include "exact/order.h"
#include "failover/blame.h"
#include "failover/carry.h"
#include "failover/fence.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "failover/lost.h"
#include "failover/made.h"
#include "failover/move.h"
#include "failover/owned.h"
#include "failover/pools.h"
#include "failover/remains.h"
#include "failover/vmm.h"

void *mpsd_inner[MPSD_SLOTS];
MPSD_READ_OFTEN const struct mpsd_tables *mpsd_first_tables;
MPSD_READ_OFTEN atomic_uint_least64_t mpsd_moves;
atomic_uint mpsd_inside[MPSD_COPIES_KNOWN];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static _Thread_local uint64_t thread_moves;	/* up to which this thread has its contexts */

void mpsd_phase_begin(void)
{
	atomic_fetch_add(&mpsd_moves, 1);
}

void mpsd_phase_end(bool moved)
{
	pthread_mutex_lock(&lock);
	/* Where nothing was moved, the number is that of before. */
	atomic_fetch_add(&mpsd_moves, moved ? 1 : -1ull);
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

void mpsd_phase_wake(void)
{
	pthread_mutex_lock(&lock);
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

/* A thread has its current context in the copy that it last called. */
static void bring_context(uint64_t moves)
{
	if (thread_moves != moves)
		mpsd_move_thread(!thread_moves);
	thread_moves = moves;
}

static uint64_t settled(void)
{
	uint64_t moves = atomic_load(&mpsd_moves);

	if (moves & 1) {
		struct timespec until = mpsd_in(MPSD_MOVE_MS);

		mpsd_work_held(true);
		pthread_mutex_lock(&lock);
		while (atomic_load(&mpsd_moves) & 1 && !pthread_cond_timedwait(&changed, &lock, &until))
			;
		moves = atomic_load(&mpsd_moves);
		pthread_mutex_unlock(&lock);
		mpsd_work_held(false);
	}
	/* A move that does not end leaves the program where it was. */
	return moves & ~1ull;
}

/* Counted before the number is read again: whoever unloads a copy looks after it has changed the number. */
uint64_t mpsd_carry_wait(void)
{
	for (;;) {
		uint64_t moves = settled();

		if (!moves) {
			mpsd_thread.tables = mpsd_first_tables;
			return moves;
		}
		atomic_fetch_add(mpsd_inside_of(moves), 1);
		mpsd_thread.tables = atomic_load(&mpsd_tables_now);
		if (mpsd_moves_done() == moves && mpsd_thread.tables->moves == moves) {
			bring_context(moves);
			return moves;
		}
		mpsd_carry_leave(moves);
	}
}

/* What is waited for may change meanwhile: each change is told. */
static bool wait_for_word(uint64_t moves)
{
	struct timespec until;
	int ms, over = 0;

	if (!mpsd_line_word_ms())
		return atomic_load(&mpsd_moves) != moves;
	pthread_mutex_lock(&lock);
	while (!over && atomic_load(&mpsd_moves) == moves && (ms = mpsd_line_word_ms())) {
		until = mpsd_in(ms);
		over = pthread_cond_timedwait(&changed, &lock, &until);
	}
	pthread_mutex_unlock(&lock);
	if (atomic_load(&mpsd_moves) == moves)
		mpsd_line_give_up();
	return atomic_load(&mpsd_moves) != moves;
}

bool mpsd_phase_word(CUresult result, uint64_t moves)
{
	mpsd_line_error(result, moves);
	if (atomic_load(&mpsd_moves) == moves && !wait_for_word(moves)) {
		mpsd_lost_note(result);
		return false;
	}
	settled();
	return true;
}

/* Whatever went wrong while the context changed is tried again in the next one. */
bool mpsd_carry_again(CUresult result, uint64_t moves)
{
	if (result == MPSD_AGAIN)
		return true;
	if (mpsd_is_loss(result))
		mpsd_line_error(result, moves);
	mpsd_captures_refused(result);
	if (atomic_load(&mpsd_moves) == moves &&
	    (!mpsd_is_loss(result) || !wait_for_word(moves))) {
		mpsd_lost_note(result);
		return false;
	}
	return settled() != moves;
}

/* Functions that cannot come along */

static atomic_uchar noted[MPSD_SLOTS];

static CUresult not_supported(void)
{
	return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult not_permitted(void)
{
	return CUDA_ERROR_NOT_PERMITTED;
}

void *mpsd_opaque(unsigned int index)
{
	const char *name = index < MPSD_NAMES ? mpsd_names[index] : "a function of a newer driver";
	uint64_t moves;
	void *target;
	bool is;

	if (mpsd_is_forbidden())
		return (void *)not_permitted;
	/* Where a move is on it comes after it: it has made nothing yet that would be lost. */
	do {
		moves = mpsd_carry_enter();
		is = atomic_load(&noted[index]) || mpsd_line_made(CUDA_SUCCESS, name) == CUDA_SUCCESS;
		is = is && mpsd_relay_flush() && !mpsd_is_left();
		/* Its arguments may be handles of the first copy's, anywhere. */
		target = moves ? (void *)not_supported : mpsd_tables()->inner[index];
		mpsd_carry_leave(moves);
	} while (!is);
	/* Only now: whoever finds it goes on to the driver. */
	atomic_store(&noted[index], 1);
	return target;
}

static void install(const struct mpsd_carried *functions, unsigned int count)
{
	for (unsigned int i = 0; i < count; i++)
		if (mpsd_real[functions[i].index])
			__atomic_store_n(&mpsd_table[functions[i].index], functions[i].function, __ATOMIC_RELEASE);
}

void mpsd_carry_install(void)
{
	mpsd_first_tables = atomic_load(&mpsd_tables_now);
	for (unsigned int i = 0; i < MPSD_SLOTS; i++)
		mpsd_inner[i] = mpsd_table[i];
	for (unsigned int i = 0; i < MPSD_SLOTS; i++)
		if (mpsd_real[i])
			__atomic_store_n(&mpsd_table[i], (void *)(mpsd_thunks + (size_t)16 * i), __ATOMIC_RELEASE);
	install(mpsd_carried, MPSD_CARRIED);
}

void mpsd_carry_plainly(void)
{
	install(mpsd_plain, MPSD_PLAIN);
}

/* In a forked child no move will end. */
void mpsd_phase_child(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
	atomic_store(&mpsd_moves, atomic_load(&mpsd_tables_now)->moves);
	mpsd_fence_child();
	mpsd_made_child();
	mpsd_opaque_child();
	mpsd_pins_child();
	mpsd_asked_child();
	mpsd_variables_child();
	mpsd_own_child();
	mpsd_vmm_child();
	mpsd_remains_child();
	mpsd_blame_child();
	mpsd_owned_child();
	mpsd_pools_child();
}
