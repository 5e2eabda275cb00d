// SPDX-License-Identifier: MIT
/* A program's turn: the one among several of whose work some may be at fault that does its own again. */
#include <poll.h>
#include <string.h>

#include "clock.h"
#include "failover/carry.h"
#include "failover/line.h"
#include "failover/move.h"

#define SEE_NS 1000000000ull
#define SPIN_NS 2000000ull	/* most have little to do again, and others wait for their turn: first of all that is told */

static CUresult see_it_end(int line)
{
	struct pollfd polled = { .fd = line, .events = POLLIN };
	uint64_t began = mpsd_now_ns(), passed = 0;
	CUresult result;

	while ((result = mpsd_exact_look()) == CUDA_ERROR_NOT_READY && passed < SEE_NS) {
		if (poll(&polled, 1, passed < SPIN_NS ? 0 : 1))
			return result;
		passed = mpsd_now_ns() - began;
		if (passed >= SPIN_NS)
			mpsd_cover_again();
	}
	return result;
}

bool mpsd_turn_take_it(bool may, int line, struct mpsd_failover_message *done)
{
	struct mpsd_replayed replayed = { 0 };
	CUresult result = CUDA_SUCCESS;

	mpsd_turn(may, &replayed);
	if (!replayed.unsure)
		result = see_it_end(line);
	done->values[0] = replayed.bytes;
	done->values[1] = replayed.operations;
	if (replayed.unsure)
		strncpy(done->text, replayed.unsure, sizeof(done->text) - 1);
	/* The daemon may not know yet that the domain is lost: whose turn it was then is all that names who did it. */
	if (!mpsd_is_loss(result))
		return true;
	mpsd_line_error(result, mpsd_moves_done());
	return false;
}

void mpsd_turn_forgo(void)
{
	struct mpsd_replayed replayed = { 0 };

	if (mpsd_turn_is_due())
		mpsd_turn(false, &replayed);
	mpsd_cover_again();
}
