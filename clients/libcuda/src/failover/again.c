// SPDX-License-Identifier: MIT
/* A program's turn: the one among several of whose work some may be at fault that does its own again. */
#include <poll.h>
#include <string.h>

#include "failover/move.h"

#define SEE_MS 1000

static void see_it_end(int line)
{
	struct pollfd polled = { .fd = line, .events = POLLIN };

	for (int ms = 0; ms < SEE_MS && mpsd_exact_look() == CUDA_ERROR_NOT_READY; ms++)
		if (poll(&polled, 1, 1))
			return;
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
