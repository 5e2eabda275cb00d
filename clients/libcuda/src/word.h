/* SPDX-License-Identifier: MIT */
/*
 * A lock that is one word. A launch takes two of them when the program has used the processor's nearer memory for something
 * else, where a mutex of the C library's costs waits for its far memory, and each of its calls a branch that nothing
 * foresees. The kernel is asked only where somebody waits (U. Drepper, Futexes Are Tricky, 2011).
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum mpsd_word_state {
	MPSD_WORD_IS_FREE,
	MPSD_WORD_IS_TAKEN,
	MPSD_WORD_IS_AWAITED,	/* taken, and somebody may wait */
};

struct mpsd_word {
	atomic_uint state;	/* enum mpsd_word_state */
};

/* Between two looks at what another thread is about to write. */
static inline void mpsd_word_pause(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("isb");
#endif
}

/* False: somebody has it. */
static inline bool mpsd_word_try(struct mpsd_word *word)
{
	unsigned int state = MPSD_WORD_IS_FREE;

	return atomic_compare_exchange_strong_explicit(&word->state, &state, MPSD_WORD_IS_TAKEN, memory_order_acquire,
						       memory_order_relaxed);
}

/* The same, some microseconds later: mostly it is taken for less than one, or for one call of the driver. */
bool mpsd_word_try_soon(struct mpsd_word *word);

/* The same, after a wait of a millisecond at most; errno stays. Whoever comes back without it may ask something else, and look again. */
bool mpsd_word_look(struct mpsd_word *word);

/* For so long at most, in ns, or little more. */
bool mpsd_word_try_for(struct mpsd_word *word, uint64_t ns);

void mpsd_word_wait(struct mpsd_word *word);
void mpsd_word_wake(struct mpsd_word *word);

static inline void mpsd_word_take(struct mpsd_word *word)
{
	if (__builtin_expect(!mpsd_word_try(word), 0))
		mpsd_word_wait(word);
}

static inline void mpsd_word_give(struct mpsd_word *word)
{
	if (__builtin_expect(atomic_exchange_explicit(&word->state, MPSD_WORD_IS_FREE, memory_order_release) ==
			     MPSD_WORD_IS_AWAITED, 0))
		mpsd_word_wake(word);
}

/* In a forked child: another thread of the parent's may have had it. */
static inline void mpsd_word_child(struct mpsd_word *word)
{
	atomic_store(&word->state, MPSD_WORD_IS_FREE);
}
