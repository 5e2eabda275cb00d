// SPDX-License-Identifier: MIT
/* Who submits, one thread at a time in each copy. */
#include "exact/state.h"

struct mpsd_order mpsd_orders[MPSD_ORDERS];

bool mpsd_order_wait(uint64_t moves)
{
	struct mpsd_word *word = mpsd_order_of(moves);

	if (mpsd_word_try_soon(word))
		return true;
	while (!mpsd_word_look(word)) {
		if (atomic_load(&mpsd_moves) == moves)
			continue;
		/* It may be this one that was woken. */
		mpsd_word_wake(word);
		return false;
	}
	return true;
}

void mpsd_orders_child(void)
{
	for (unsigned int i = 0; i < MPSD_ORDERS; i++)
		mpsd_word_child(&mpsd_orders[i].word);
}

CUresult mpsd_in_order(CUresult (*call)(void))
{
	uint64_t moves = mpsd_tables()->moves;
	CUresult result;

	if (!mpsd_order_take(moves))
		return MPSD_AGAIN;
	result = call();
	mpsd_order_give(moves);
	return result;
}
