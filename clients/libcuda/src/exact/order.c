// SPDX-License-Identifier: MIT
/*
 * Who submits, one thread at a time in each copy. A launch comes here when the program has used the processor's nearer
 * memory for something else, where trying a mutex of the C library's costs two waits for its far memory, a table's and a
 * setting's: so this is one word, and the kernel is asked only where somebody waits (U. Drepper, Futexes Are Tricky, 2011).
 */
#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "exact/state.h"

#define ORDERS 8		/* a thread may still be stuck in a copy that was left */
#define LOOK_NS 1000000

enum { FREE, TAKEN, AWAITED };	/* awaited: taken, and somebody may wait */

static struct order {
	_Alignas(64) atomic_uint state;
} orders[ORDERS];

static struct order *order_of(uint64_t moves)
{
	return &orders[moves / 2 % ORDERS];
}

/* For so long at most; for nothing, if it is not awaited any more, or a signal comes. */
static void wait_for(struct order *order)
{
	const struct timespec most = { 0, LOOK_NS };
	int before = errno;

	syscall(SYS_futex, &order->state, FUTEX_WAIT_PRIVATE, AWAITED, &most, NULL, 0);
	/* The program's. */
	errno = before;
}

static bool try(struct order *order)
{
	unsigned int state = FREE;

	return atomic_compare_exchange_strong_explicit(&order->state, &state, TAKEN, memory_order_acquire,
						       memory_order_relaxed);
}

MPSD_OF_A_LAUNCH void mpsd_order_fetch(void)
{
	__builtin_prefetch(order_of(atomic_load_explicit(&mpsd_moves, memory_order_relaxed)), 1);
}

MPSD_OF_A_LAUNCH bool mpsd_order_take(uint64_t moves)
{
	struct order *order = order_of(moves);

	if (__builtin_expect(try(order), 1))
		return true;
	while (atomic_exchange_explicit(&order->state, AWAITED, memory_order_acquire) != FREE) {
		wait_for(order);
		if (atomic_load(&mpsd_moves) != moves)
			return false;
	}
	return true;
}

bool mpsd_order_try(uint64_t moves)
{
	return try(order_of(moves));
}

MPSD_OF_A_LAUNCH void mpsd_order_give(uint64_t moves)
{
	struct order *order = order_of(moves);

	if (__builtin_expect(atomic_exchange_explicit(&order->state, FREE, memory_order_release) == AWAITED, 0))
		syscall(SYS_futex, &order->state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* Another thread of the parent's may have had it. */
void mpsd_orders_child(void)
{
	for (unsigned int i = 0; i < ORDERS; i++)
		atomic_store(&orders[i].state, FREE);
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
