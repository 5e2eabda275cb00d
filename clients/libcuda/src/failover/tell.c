// SPDX-License-Identifier: MIT
/* What the thread that talks with the daemon says (failoverwire.h). */
#include <string.h>
#include <sys/socket.h>

#include "exact/exact.h"
#include "failover/carry.h"
#include "failover/copy.h"
#include "failover/cost.h"
#include "failover/line.h"
#include "failover/made.h"
#include "failover/move.h"
#include "failover/ownpages.h"

#define MOST_PAGES 64

/* Where the daemon takes that; else -1. Of what was told there, how often it had changed. By the line's thread. */
static int left_line = -1;
static unsigned int left_told;

struct mpsd_failover_message mpsd_line_message(enum mpsd_failover_kind kind, uint64_t generation, const char *text)
{
	struct mpsd_failover_message message = {
		.magic = MPSD_FAILOVER_MAGIC,
		.version = MPSD_FAILOVER_VERSION,
		.kind = (uint16_t)kind,
		.generation = generation,
	};

	if (text)
		strncpy(message.text, text, sizeof(message.text) - 1);
	return message;
}

bool mpsd_line_say(int line, const struct mpsd_failover_message *message)
{
	return send(line, message, sizeof(*message), MSG_NOSIGNAL) == (ssize_t)sizeof(*message);
}

static bool tell_notes(int line, enum mpsd_failover_kind kind, uint64_t generation, struct mpsd_notes *notes,
		       unsigned int *told)
{
	const char *what;

	while ((what = mpsd_notes_next(notes, told))) {
		struct mpsd_failover_message message = mpsd_line_message(kind, generation, what);

		if (!mpsd_line_say(line, &message))
			return false;
	}
	return true;
}

bool mpsd_line_tell(int line, uint64_t generation, struct mpsd_told *told)
{
	return tell_notes(line, MPSD_FAILOVER_OPAQUE, generation, mpsd_opaque_notes(), &told->opaque) &&
	       tell_notes(line, MPSD_FAILOVER_UNSURE, generation, mpsd_unsure_notes(), &told->unsure);
}

bool mpsd_line_tell_error(int line, uint64_t generation)
{
	struct mpsd_failover_message message = mpsd_line_message(MPSD_FAILOVER_OWN_ERROR, generation, NULL);

	message.values[0] = mpsd_own_error_take();
	return !message.values[0] || mpsd_line_say(line, &message);
}

bool mpsd_line_tell_ready(int line, uint64_t generation, uint64_t took_ns)
{
	struct mpsd_failover_message message = mpsd_line_message(MPSD_FAILOVER_READY, generation, NULL);

	message.values[0] = took_ns;
	message.values[1] = mpsd_cost_bytes();
	return mpsd_line_say(line, &message);
}

bool mpsd_line_tell_unready(int line, uint64_t generation, const char *why, bool for_memory)
{
	struct mpsd_failover_message message = mpsd_line_message(MPSD_FAILOVER_UNREADY, generation, why);

	message.values[0] = for_memory;
	return mpsd_line_say(line, &message);
}

bool mpsd_line_tell_moved(int line, uint64_t generation, const struct mpsd_times *times, uint64_t began, bool goes_on)
{
	struct mpsd_failover_message message = mpsd_line_message(MPSD_FAILOVER_LOOKED, generation, NULL);

	message.values[0] = times->whose;
	message.values[1] = goes_on;
	if (times->whose && !mpsd_line_say(line, &message))
		return false;
	message = mpsd_line_message(MPSD_FAILOVER_MOVED, generation, times->replayed.unsure);
	message.values[0] = times->held_ns - began;
	message.values[1] = times->fence_ns - began;
	message.values[2] = times->on_ns - began;
	message.values[3] = times->waits ? times->takes_ns : times->replayed.bytes;
	message.values[4] = times->replayed.operations;
	message.values[5] = times->waits;
	return mpsd_line_say(line, &message);
}

void mpsd_left_may_tell(int line)
{
	left_line = line;
	left_told = 0;
}

bool mpsd_left_tell(bool may_wait)
{
	struct mpsd_failover_message message = mpsd_line_message(MPSD_FAILOVER_LEFT, 0, NULL);
	unsigned int numbers[MPSD_COPY_NUMBERS], changes = mpsd_left_changes(), count;
	struct mpsd_pages pages[MOST_PAGES];

	/* Who waits for its turn is not kept from it. */
	if (left_line < 0 || left_told == changes || (may_wait && mpsd_turn_is_due()))
		return true;
	left_told = changes;
	pages[0] = (struct mpsd_pages){ 0, 0 };
	count = mpsd_pages_find(numbers, mpsd_left_numbers(numbers), pages, MOST_PAGES);
	/* Where there are none, that is said. */
	for (unsigned int i = 0; i < (count ? count : 1); i++) {
		message.values[0] = !i;
		message.values[1] = pages[i].from;
		message.values[2] = pages[i].to;
		if (!mpsd_line_say(left_line, &message))
			return false;
	}
	return true;
}
