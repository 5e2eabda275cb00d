// SPDX-License-Identifier: MIT
/* A program's turn: the one among several of whose work some may be at fault that does its own again. */
#include <poll.h>
#include <string.h>

#include "clock.h"
#include "failover/move.h"

#define SEE_NS 1000000000ull
#define SPIN_NS 2000000ull	/* most have little to do again, and others wait for their turn */

static void see_it_end(int line)
{
	struct pollfd polled = { .fd = line, .events = POLLIN };
	uint64_t began = mpsd_now_ns(), passed = 0;

	while (passed < SEE_NS && mpsd_exact_look() == CUDA_ERROR_NOT_READY) {
		if (poll(&polled, 1, passed < SPIN_NS ? 0 : 1))
			return;
		passed = mpsd_now_ns() - began;
	}
}

void mpsd_turn_take_it(bool may, int line, struct mpsd_failover_message *done)
{
	struct mpsd_replayed replayed = { 0 };

	mpsd_turn(may, &replayed);
	if (!replayed.unsure)
		see_it_end(line);
	done->values[0] = replayed.bytes;
	done->values[1] = replayed.operations;
	if (replayed.unsure)
		strncpy(done->text, replayed.unsure, sizeof(done->text) - 1);
}

void mpsd_turn_forgo(void)
{
	struct mpsd_replayed replayed = { 0 };

	if (mpsd_turn_is_due())
		mpsd_turn(false, &replayed);
}
