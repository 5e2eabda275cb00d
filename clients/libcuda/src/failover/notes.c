// SPDX-License-Identifier: MIT
/* What the daemon is told of the program, each once: what cannot come along or cannot be undone, and its errors. */
#include <pthread.h>

#include "clock.h"
#include "exact/exact.h"
#include "failover/carry.h"
#include "failover/line.h"

static struct mpsd_notes opaque, unsure;
static pthread_mutex_t opaque_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint_least64_t own_error;	/* to be said, below the context's `moves`; 0: none */
static atomic_uint_least64_t error_of;	/* 1 + `moves` of the context whose error was said; 0: none */

static bool note(struct mpsd_notes *notes, const char *what)
{
	unsigned int number;

	for (unsigned int i = 0; i < MPSD_MOST_NOTES && i < atomic_load(&notes->count); i++)
		if (atomic_load(&notes->names[i]) == what)
			return false;
	number = atomic_fetch_add(&notes->count, 1);
	if (number < MPSD_MOST_NOTES)
		atomic_store(&notes->names[number], what);
	return number < MPSD_MOST_NOTES;
}

const char *mpsd_notes_next(struct mpsd_notes *notes, unsigned int *told)
{
	const char *what = NULL;

	if (*told < atomic_load(&notes->count) && *told < MPSD_MOST_NOTES)
		what = atomic_load(&notes->names[*told]);
	*told += what != NULL;
	return what;
}

struct mpsd_notes *mpsd_opaque_notes(void)
{
	return &opaque;
}

struct mpsd_notes *mpsd_unsure_notes(void)
{
	return &unsure;
}

bool mpsd_opaque_begin(void)
{
	pthread_mutex_lock(&opaque_lock);
	return atomic_load(&opaque.count) == 0;
}

void mpsd_opaque_end(void)
{
	pthread_mutex_unlock(&opaque_lock);
}

void mpsd_opaque_child(void)
{
	opaque_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

/* False: the move hangs in the driver. */
static bool take(void)
{
	struct timespec until = mpsd_in(MPSD_MOVE_MS);

	return !pthread_mutex_timedlock(&opaque_lock, &until);
}

bool mpsd_opaque_note(const char *what)
{
	bool is_taken = take(), is = note(&opaque, what);

	if (is_taken)
		pthread_mutex_unlock(&opaque_lock);
	return is;
}

CUresult mpsd_line_made(CUresult result, const char *what)
{
	bool is_taken, is_left, is_new;

	if (result != CUDA_SUCCESS)
		return result;
	is_taken = take();
	is_left = mpsd_is_left();
	is_new = !is_left && note(&opaque, what);
	if (is_taken)
		pthread_mutex_unlock(&opaque_lock);
	if (is_new)
		mpsd_opaque_noted(what);
	return is_left ? MPSD_AGAIN : result;
}

void mpsd_opaque_noted(const char *what)
{
	mpsd_exact_stop(what);
	mpsd_line_wake();
}

void mpsd_line_opaque(const char *what)
{
	if (mpsd_opaque_note(what))
		mpsd_opaque_noted(what);
}

void mpsd_line_unsure(const char *what)
{
	if (note(&unsure, what))
		mpsd_line_wake();
}

/* Once for each context that is in use. The thread says it: it alone knows whose the descriptor is. */
void mpsd_line_error(CUresult result, uint64_t moves)
{
	if (mpsd_moves_done() == moves && atomic_exchange(&error_of, moves + 1) != moves + 1) {
		atomic_store(&own_error, moves << 16 | (uint64_t)result);
		mpsd_line_wake();
	}
}

uint64_t mpsd_own_error_take(void)
{
	uint64_t error = atomic_exchange(&own_error, 0);

	return error >> 16 == mpsd_moves_done() ? error & 0xffff : 0;
}

bool mpsd_own_error_met(void)
{
	return atomic_load(&error_of) == mpsd_moves_done() + 1;
}

void mpsd_own_error_forget(void)
{
	atomic_store(&error_of, 0);
}
