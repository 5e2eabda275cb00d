/* SPDX-License-Identifier: MIT */
/* A capture that is under way, for who follows it (graph.c) and who goes on with it elsewhere (sessions.c). */
#pragma once

#include "failover/graph.h"
#include "failover/nodes.h"

struct mpsd_session {
	struct mpsd_session *next;
	cuuint64_t id, name;		/* of the capture, in the copy in use; and to the program */
	bool is_spoiled;		/* the driver has made it invalid in this copy: the program has to end it, and has not */
	bool is_void;			/* there is none in this copy: what comes into it fails, and so does its end */
	struct mpsd_graph *graph;
	CUgraph into;			/* the program's graph that it is captured into; NULL: one of its own */
	CUgraphNode *after;		/* by the program's names, what it begins behind there */
	CUgraphEdgeData *edges;		/* NULL: they are plain */
	size_t count;
};

/* In the copy of this call: begins in its stream. */
CUresult mpsd_session_begin(const struct mpsd_session *session, CUstreamCaptureMode mode);

void mpsd_session_free(struct mpsd_session *session);	/* NULL: nothing; its graph, too */

extern struct mpsd_session *mpsd_sessions;

void mpsd_sessions_lock(void);
void mpsd_sessions_unlock(void);
