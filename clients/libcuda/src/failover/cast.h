/* SPDX-License-Identifier: MIT */
/* Stand-ins for streams and events of the program in a capture that is made again: those of its own may have gone. */
#pragma once

#include <cuda.h>
#include <stdbool.h>

#define MPSD_CAST_MOST 64		/* streams, or events, in one capture */

/* Begins as { 0 }. */
struct mpsd_cast {
	struct mpsd_cast_part {
		const void *names[MPSD_CAST_MOST];
		void *natives[MPSD_CAST_MOST];
		unsigned int count;
	} streams, events;
};

/* The same for the same name, made when it is first asked for. NOT_SUPPORTED: there are too many. */
CUresult mpsd_cast_stream(struct mpsd_cast *cast, CUstream name, CUstream *native);
CUresult mpsd_cast_event(struct mpsd_cast *cast, CUevent name, CUevent *native);

/* Whether what is given to the stream is captured: what was not joined to the capture would run at once. */
struct mpsd_op;
CUresult mpsd_cast_joined(const struct mpsd_op *op, CUstream stream);

/* With the program's own, but those that have gone. `native`: the node that it is. */
CUresult mpsd_cast_issue_known(struct mpsd_cast *gone, const struct mpsd_op *op, CUgraphNode *native);

/* Nothing of the program's has that name any more. */
bool mpsd_cast_is_gone(const void *name);

void mpsd_cast_end(struct mpsd_cast *cast);
