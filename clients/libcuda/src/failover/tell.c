// SPDX-License-Identifier: MIT
/* What the thread that talks with the daemon says (failoverwire.h). */
#include <string.h>
#include <sys/socket.h>

#include "exact/exact.h"
#include "failover/carry.h"
#include "failover/line.h"
#include "failover/made.h"

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
