// SPDX-License-Identifier: MIT
#include "word.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"

#define LOOK_NS 1000000
#define SPINS 200u

bool mpsd_word_try_soon(struct mpsd_word *word)
{
	for (unsigned int i = 0; i < SPINS; i++) {
		if (atomic_load_explicit(&word->state, memory_order_relaxed) == MPSD_WORD_IS_FREE && mpsd_word_try(word))
			return true;
		mpsd_word_pause();
	}
	return false;
}

bool mpsd_word_look(struct mpsd_word *word)
{
	const struct timespec most = { 0, LOOK_NS };
	int before = errno;

	if (atomic_exchange_explicit(&word->state, MPSD_WORD_IS_AWAITED, memory_order_acquire) == MPSD_WORD_IS_FREE)
		return true;
	/* For nothing, if it is not awaited any more, or a signal comes. */
	syscall(SYS_futex, &word->state, FUTEX_WAIT_PRIVATE, MPSD_WORD_IS_AWAITED, &most, NULL, 0);
	/* The program's. */
	errno = before;
	return false;
}

bool mpsd_word_try_for(struct mpsd_word *word, uint64_t ns)
{
	uint64_t until;

	if (mpsd_word_try(word))
		return true;
	until = mpsd_now_ns() + ns;
	do {
		if (mpsd_word_look(word))
			return true;
	} while (mpsd_now_ns() < until);
	/* Others may still wait. */
	return atomic_exchange_explicit(&word->state, MPSD_WORD_IS_AWAITED, memory_order_acquire) == MPSD_WORD_IS_FREE;
}

void mpsd_word_wait(struct mpsd_word *word)
{
	if (mpsd_word_try_soon(word))
		return;
	while (!mpsd_word_look(word))
		;
}

void mpsd_word_wake(struct mpsd_word *word)
{
	int before = errno;

	syscall(SYS_futex, &word->state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
	errno = before;
}
