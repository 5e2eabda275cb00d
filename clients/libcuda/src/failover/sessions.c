// SPDX-License-Identifier: MIT
/* Captures that are under way: of which the driver has made some invalid, and how they go on in another copy. */
#include "failover/session.h"

#include <pthread.h>
#include <stdlib.h>

#include "failover/cast.h"
#include "failover/line.h"

MPSD_READ_OFTEN atomic_uint mpsd_captures;
struct mpsd_session *mpsd_sessions;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void mpsd_sessions_lock(void)
{
	pthread_mutex_lock(&lock);
}

void mpsd_sessions_unlock(void)
{
	pthread_mutex_unlock(&lock);
}

void mpsd_session_free(struct mpsd_session *session)
{
	if (!session)
		return;
	mpsd_graph_let_go(session->graph);
	free(session->after);
	free(session->edges);
	free(session);
}

static CUresult begin_into(const struct mpsd_session *session, CUstream origin, CUstreamCaptureMode mode)
{
	CUgraphNode *after = malloc((session->count + 1) * sizeof(*after));
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
	CUgraph native, graph;

	if (after)
		result = mpsd_graph_native(session->into, &native);
	for (size_t i = 0; i < session->count && result == CUDA_SUCCESS; i++)
		result = mpsd_node_native(session->after[i], &after[i], &graph);
	if (result == CUDA_SUCCESS)
		result = inner_cuStreamBeginCaptureToGraph(origin, native, session->count ? after : NULL,
							   session->edges, session->count, mode);
	free(after);
	return result;
}

CUresult mpsd_session_begin(const struct mpsd_session *session, CUstreamCaptureMode mode)
{
	CUstream origin = mpsd_native(session->graph->origin);

	return session->into ? begin_into(session, origin, mode) : inner_cuStreamBeginCapture_v2(origin, mode);
}

static bool is_invalid(CUstream native)
{
	return mpsd_capture_status(native) == CU_STREAM_CAPTURE_STATUS_INVALIDATED;
}

/* What makes one invalid is refused itself, and so is what is given to it afterwards; in a lost context nobody says so. */
void mpsd_captures_refused(CUresult result)
{
	uint64_t moves;

	if (!mpsd_capturing() || result < CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED ||
	    result > CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
		return;
	moves = mpsd_carry_enter();
	mpsd_sessions_lock();
	for (struct mpsd_session *session = mpsd_sessions; session; session = session->next)
		if (!session->is_void && !session->is_spoiled)
			session->is_spoiled = is_invalid(mpsd_native(session->graph->origin));
	mpsd_sessions_unlock();
	mpsd_carry_leave(moves);
}

/* In another copy */

/* With the streams and events of the program, which it goes on with; those that have gone meanwhile are made anew. */
static CUresult go_on(struct mpsd_session *session)
{
	struct mpsd_cast gone = { 0 };
	CUstream origin = mpsd_native(session->graph->origin);
	/* The thread that goes on, and ends it, is another one than this. */
	CUresult result = mpsd_session_begin(session, CU_STREAM_CAPTURE_MODE_RELAXED);

	for (unsigned int i = 0; i < session->graph->count && result == CUDA_SUCCESS; i++) {
		struct mpsd_node *node = &session->graph->nodes[i];

		result = mpsd_cast_issue_known(&gone, node->op, &node->native);
	}
	mpsd_cast_end(&gone);
	session->id = mpsd_capture_of(origin);
	return result;
}

/* The program hears of it by what it does next with that capture. */
static void make_void(struct mpsd_session *session)
{
	session->is_void = true;
	session->is_spoiled = false;
	session->id = 0;
}

/* What has begun in this copy ends now. */
static void end_here(struct mpsd_session *session)
{
	CUgraph graph = NULL;

	inner_cuStreamEndCapture(mpsd_native(session->graph->origin), &graph);
	if (graph && !session->into)
		real_cuGraphDestroy(graph);
}

static void move(struct mpsd_session *session)
{
	CUresult result;

	if (session->is_spoiled)
		make_void(session);
	if (session->is_void)
		return;
	result = go_on(session);
	/* In the context after one that is lost already it goes on. */
	if (result == CUDA_SUCCESS || mpsd_is_loss(result))
		return;
	end_here(session);
	make_void(session);
	mpsd_line_opaque("a capture that cannot continue after a fail-over");
}

void mpsd_captures_move(void)
{
	mpsd_sessions_lock();
	for (struct mpsd_session *session = mpsd_sessions; session; session = session->next)
		move(session);
	mpsd_sessions_unlock();
}

void mpsd_captures_child(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	mpsd_joins_child();
	atomic_store(&mpsd_captures, 0);
}
