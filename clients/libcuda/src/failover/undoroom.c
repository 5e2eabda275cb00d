// SPDX-License-Identifier: MIT
#include "failover/undoroom.h"

#include <stdatomic.h>
#include <unistd.h>

#include "clock.h"
#include "failover/carry.h"

#define LOOK_US 30
#define ROOM_NS 2000000000ull	/* then a program goes on without */

static MPSD_READ_OFTEN atomic_uint_least64_t shut_of;	/* 1 + the moves before the copy; 0: it is open */
static atomic_uint_least64_t awaited_since_ns;		/* 0: nobody does */
static atomic_bool ends;

void mpsd_undoroom_shut(uint64_t moves)
{
	atomic_store(&awaited_since_ns, 0);
	atomic_store(&shut_of, 1 + moves);
}

void mpsd_undoroom_open(uint64_t moves)
{
	uint64_t own = 1 + moves;

	atomic_compare_exchange_strong(&shut_of, &own, 0);
}

bool mpsd_undoroom_is_open(void)
{
	return !atomic_load(&shut_of);
}

CUresult mpsd_undoroom_await(void)
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
		usleep(LOOK_US);
	}
	return CUDA_SUCCESS;
}

void mpsd_undoroom_leave_off(void)
{
	atomic_store(&ends, true);
}

bool mpsd_undoroom_is_left_off(void)
{
	return atomic_load(&ends);
}

void mpsd_undoroom_child(void)
{
	atomic_store(&shut_of, 0);
}
