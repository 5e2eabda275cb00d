// SPDX-License-Identifier: MIT
/* A program's turn: the one among several of whose work some may be at fault that does its own again. */
#include <poll.h>

#include "clock.h"
#include "failover/carry.h"
#include "failover/fence.h"
#include "failover/line.h"
#include "failover/move.h"

#define SEE_NS 1000000000ull
#define SPIN_NS 2000000ull	/* most have little to do again, and others wait for their turn: first of all that is told */

/* What was done again when it was last said that it runs on; `moves` 0: nothing does. By the line's thread. */
static struct {
	uint64_t moves, home, epoch;
	struct mpsd_replayed replayed;
} on;

static CUresult see_it_end(int line, uint64_t epoch)
{
	struct pollfd polled = { .fd = line, .events = POLLIN };
	uint64_t began = mpsd_now_ns(), passed = 0;
	bool spins = true;
	CUresult result;

	while ((result = mpsd_exact_look(epoch)) == CUDA_ERROR_NOT_READY && passed < SEE_NS) {
		/* A fence that comes late is about what was left. */
		if (poll(&polled, 1, spins ? 0 : 1) && !mpsd_fence_hears())
			return result;
		passed = mpsd_now_ns() - began;
		spins = passed < SPIN_NS || mpsd_cover_step();
	}
	return result;
}

/* Nothing, where it has lost the context: that it has ended is not to be said. */
static bool say_end(int line, uint64_t home, const struct mpsd_replayed *replayed, CUresult result)
{
	struct mpsd_failover_message done = mpsd_line_message(MPSD_FAILOVER_DONE, home, replayed->unsure);

	/* The daemon may not know yet that the domain is lost: whose turn it was then is all that names who did it. */
	if (mpsd_is_loss(result)) {
		mpsd_line_error(result, mpsd_moves_done());
		return true;
	}
	done.values[0] = replayed->bytes;
	done.values[1] = replayed->operations;
	done.values[2] = result == CUDA_ERROR_NOT_READY;
	return mpsd_line_say(line, &done);
}

bool mpsd_turn_runs_on(void)
{
	return on.moves != 0;
}

/* In another copy it does not, and of what became of it in that which was left the next move has told. */
bool mpsd_turn_follow(int line)
{
	CUresult result;

	if (!on.moves)
		return true;
	if (on.moves != mpsd_moves_done()) {
		on.moves = 0;
		return true;
	}
	result = mpsd_exact_look(on.epoch);
	if (result == CUDA_ERROR_NOT_READY)
		return true;
	on.moves = 0;
	return say_end(line, on.home, &on.replayed, result);
}

bool mpsd_turn_have(bool may, int line, uint64_t home)
{
	struct mpsd_replayed replayed = { 0 };
	CUresult result;
	uint64_t epoch;
	bool is;

	mpsd_turn(may, &replayed);
	epoch = mpsd_exact_epoch();
	result = replayed.unsure ? CUDA_SUCCESS : see_it_end(line, epoch);
	on.moves = result == CUDA_ERROR_NOT_READY ? mpsd_moves_done() : 0;
	on.home = home;
	on.epoch = epoch;
	on.replayed = replayed;
	is = say_end(line, home, &replayed, result);
	mpsd_cover_again();
	return is;
}

void mpsd_turn_cut_off(void)
{
	on.moves = 0;
	mpsd_fence_listen(-1, 0);
	if (!mpsd_turn_is_due())
		mpsd_turn_forgo();
}

void mpsd_turn_forgo(void)
{
	struct mpsd_replayed replayed = { 0 };

	on.moves = 0;
	mpsd_fence_listen(-1, 0);
	if (mpsd_turn_is_due())
		mpsd_turn(false, &replayed);
	mpsd_cover_again();
	mpsd_fence_finish();
}
