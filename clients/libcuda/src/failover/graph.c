// SPDX-License-Identifier: MIT
#include "failover/graph.h"

#include <stdlib.h>
#include <string.h>

#include "exact/state.h"
#include "failover/cast.h"
#include "failover/line.h"
#include "failover/nodes.h"

struct session {
	struct session *next;
	cuuint64_t id, name;		/* of the capture, in the copy in use; and to the program */
	bool is_void;			/* it could not go on there: what comes into it fails, and so does its end */
	struct mpsd_graph *graph;
};

MPSD_READ_OFTEN atomic_uint mpsd_captures;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct session *sessions;
static cuuint64_t last_name;

static struct session *session_of(cuuint64_t id)
{
	struct session *session = id ? sessions : NULL;

	while (session && session->id != id)
		session = session->next;
	return session;
}

/* The capture in which an event was recorded last: whoever waits for it joins that. */
static struct session *session_of_event(CUevent event)
{
	for (struct session *session = sessions; session; session = session->next)
		for (unsigned int i = 0; i < session->graph->count; i++)
			if (session->graph->nodes[i].op->kind == MPSD_OP_RECORD &&
			    session->graph->nodes[i].op->event.event == event &&
			    !session->graph->nodes[i].op->event.is_elsewhere)
				return session;
	return NULL;
}

/* One that the driver has made invalid says no id: it is known by the stream where it began. */
static struct session *session_from(CUstream origin)
{
	struct session *session = sessions;

	while (session && (session->is_void || session->graph->origin != origin))
		session = session->next;
	return session;
}

static bool is_in(const struct session *session, CUstream stream)
{
	bool is = session->graph->origin == stream;

	for (unsigned int i = 0; i < session->graph->count && !is; i++)
		is = session->graph->nodes[i].op->stream == stream;
	return is;
}

static struct session *void_session_of(CUstream stream)
{
	struct session *session = sessions;

	while (session && !(session->is_void && is_in(session, stream)))
		session = session->next;
	return session;
}

/* Under the lock. What a capture has to do with the event from now on has nothing to do with what it had before. */
static void part_with(CUevent event)
{
	for (struct session *session = sessions; session; session = session->next)
		for (unsigned int i = 0; i < session->graph->count; i++) {
			struct mpsd_op *op = session->graph->nodes[i].op;

			if ((op->kind == MPSD_OP_RECORD || op->kind == MPSD_OP_WAIT) && op->event.event == event)
				op->event.is_elsewhere = true;
		}
}

void mpsd_captures_without_event(CUevent event)
{
	if (!mpsd_capturing())
		return;
	pthread_mutex_lock(&lock);
	part_with(event);
	pthread_mutex_unlock(&lock);
}

bool mpsd_is_in_void_capture(CUstream stream)
{
	bool is;

	if (!mpsd_capturing())
		return false;
	pthread_mutex_lock(&lock);
	is = void_session_of(stream) != NULL;
	pthread_mutex_unlock(&lock);
	return is;
}

static CUresult find_session(const struct mpsd_op *op, struct session **session)
{
	cuuint64_t id;
	CUresult result = mpsd_capture_ask(mpsd_native(op->stream), &id);

	*session = id ? session_of(id) : void_session_of(op->stream);
	if (!*session && op->kind == MPSD_OP_WAIT)
		*session = session_of_event(op->event.event);
	return result;
}

/* A graph reads what its copies are from when it is launched. */
static void lend(struct mpsd_op *op)
{
	if (op->kind != MPSD_OP_COPY)
		return;
	free(op->copy.kept);
	op->copy.kept = NULL;
	op->copy.is_borrowed = false;
}

/* Under the lock. */
static CUresult append(struct mpsd_graph *graph, struct mpsd_op *op)
{
	bool is_node = op->kind != MPSD_OP_RECORD && op->kind != MPSD_OP_WAIT;
	struct mpsd_node node = { .op = op, .native = is_node ? mpsd_capture_last(mpsd_native(op->stream)) : NULL };

	return mpsd_graph_append(graph, node) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Events that are nodes, or edges that kernels make: in another copy they would be others than the program's. */
static bool is_of_events(const struct mpsd_op *op)
{
	return (op->kind == MPSD_OP_RECORD && op->event.flags & CU_EVENT_RECORD_EXTERNAL) ||
	       (op->kind == MPSD_OP_WAIT && op->event.flags & CU_EVENT_WAIT_EXTERNAL) ||
	       (op->kind == MPSD_OP_LAUNCH && mpsd_launch_records_event(op));
}

/* One that waits for an event by whose name something was captured: is it in that capture now? */
static bool has_joined(const struct mpsd_op *op, const struct session *session)
{
	return op->kind != MPSD_OP_WAIT || session->is_void || mpsd_capture_of(mpsd_native(op->stream)) == session->id;
}

static CUresult issue(const struct mpsd_op *op)
{
	bool held = op->kind == MPSD_OP_WAIT && mpsd_joins_take();
	CUresult result = mpsd_op_issue(op);

	if (held)
		mpsd_captures_let();
	return result;
}

bool mpsd_capture_op(struct mpsd_op *op, CUresult *result)
{
	bool is, is_opaque = is_of_events(op);
	struct session *session;
	CUresult said;

	pthread_mutex_lock(&lock);
	said = find_session(op, &session);
	/* Done again beside captures, or in this one, it is not done once more by another that goes on. */
	if (op->kind == MPSD_OP_RECORD)
		part_with(op->event.event);
	/* What may be for a capture must not be noted as done beside it: the next copy says which it is. */
	is = session || mpsd_is_loss(said);
	if (is) {
		lend(op);
		*result = !session ? said : session->is_void ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : issue(op);
		if (mpsd_is_left())
			*result = MPSD_AGAIN;
		/* It is given once more, beside all captures. */
		is = *result != CUDA_SUCCESS || has_joined(op, session);
		if (is && *result == CUDA_SUCCESS)
			*result = append(session->graph, op);
		else if (is)
			mpsd_op_free(op);
	}
	pthread_mutex_unlock(&lock);
	if (is && is_opaque && *result == CUDA_SUCCESS)
		mpsd_line_opaque("a capture with events that are more than edges");
	return is;
}

/* The program's calls */

static CUresult nothing(void)
{
	return CUDA_SUCCESS;
}

/* What is before a capture is proven without it, and who has not seen that it comes has gone. */
static CUresult prove_before(CUstream stream)
{
	struct mpsd_proof proof;
	CUresult result = mpsd_exact_mark(&proof, MPSD_WAIT_STREAM, stream);

	return result == CUDA_SUCCESS ? mpsd_in_order(nothing) : result;
}

CUresult make_cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode)
{
	struct session *session = calloc(1, sizeof(*session));
	struct mpsd_graph *graph = mpsd_graph_new(hStream, false);
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
	bool held;

	/* First: who marks other streams, or looks at them, asks from here on. */
	atomic_fetch_add(&mpsd_captures, 1);
	if (session && graph)
		result = mpsd_exact() ? prove_before(hStream) : CUDA_SUCCESS;
	if (session && graph && result == CUDA_SUCCESS) {
		held = mpsd_joins_take();
		result = inner_cuStreamBeginCapture_v2(mpsd_native(hStream), mode);
		if (held)
			mpsd_captures_let();
	}
	if (result != CUDA_SUCCESS) {
		atomic_fetch_sub(&mpsd_captures, 1);
		free(session);
		mpsd_graph_let_go(graph);
		return result;
	}
	pthread_mutex_lock(&lock);
	/* What is there when the copy is left goes on in the next one, and is not begun again. */
	if (mpsd_is_left()) {
		result = MPSD_AGAIN;
	} else {
		session->id = mpsd_capture_of(mpsd_native(hStream));
		/* Another copy of the driver counts anew. */
		session->name = mpsd_tables()->moves ? last_name + 1 : session->id;
		last_name = session->name > last_name ? session->name : last_name;
		session->graph = graph;
		session->next = sessions;
		sessions = session;
	}
	pthread_mutex_unlock(&lock);
	if (result != CUDA_SUCCESS) {
		atomic_fetch_sub(&mpsd_captures, 1);
		free(session);
		mpsd_graph_let_go(graph);
	}
	return result;
}

CUresult mpsd_capture_tell(CUresult result, CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id)
{
	struct session *session;
	cuuint64_t native;

	if (!mpsd_capturing() || result != CUDA_SUCCESS)
		return mpsd_answered(result);
	native = mpsd_capture_of(mpsd_native(stream));
	pthread_mutex_lock(&lock);
	session = native ? session_of(native) : void_session_of(stream);
	if (session && session->is_void && status)
		*status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
	if (session && id)
		*id = session->name;
	pthread_mutex_unlock(&lock);
	return mpsd_answered(result);
}

static struct session *take(struct session *session)
{
	struct session **link = &sessions;

	while (*link && *link != session)
		link = &(*link)->next;
	if (!*link)
		return NULL;
	*link = session->next;
	atomic_fetch_sub(&mpsd_captures, 1);
	return session;
}

static void end_session(struct session *session)
{
	mpsd_graph_let_go(session->graph);
	free(take(session));
}

void mpsd_captures_without(CUstream stream)
{
	struct session *session, *next;

	if (!mpsd_capturing())
		return;
	pthread_mutex_lock(&lock);
	for (session = sessions; session; session = next) {
		next = session->next;
		if (session->graph->origin == stream)
			end_session(session);
	}
	pthread_mutex_unlock(&lock);
}

static bool is_void(CUstream origin, CUresult *result)
{
	struct session *session = void_session_of(origin);
	bool is = session && session->graph->origin == origin;

	if (is)
		*result = mpsd_is_left() ? MPSD_AGAIN : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	if (is && *result != MPSD_AGAIN)
		end_session(session);
	return is;
}

CUresult make_cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
{
	uint64_t moves = mpsd_tables()->moves;
	struct session *session;
	CUresult result;

	pthread_mutex_lock(&lock);
	session = session_of(mpsd_capture_of(mpsd_native(hStream)));
	if (!session)
		session = session_from(hStream);
	if (!is_void(hStream, &result))
		result = inner_cuStreamEndCapture(mpsd_native(hStream), phGraph);
	else if (phGraph)
		*phGraph = NULL;
	if (session && mpsd_is_left()) {
		/* It goes on in the next copy, and is ended there. */
		result = MPSD_AGAIN;
	} else if (session && !mpsd_is_loss(result) && !mpsd_is_native_capturing(mpsd_native(hStream))) {
		mpsd_graph_hold(session->graph);
		result = mpsd_graph_note(result, MPSD_MADE_GRAPH, (void **)phGraph, session->graph, 0, moves);
		/* Overtaken since, it is still there for the move to go on with. */
		if (result != MPSD_AGAIN)
			end_session(session);
	}
	pthread_mutex_unlock(&lock);
	return result;
}

/* In another copy */

/* With the streams and events of the program, which it goes on with; those that have gone meanwhile are made anew. */
static CUresult go_on(struct session *session)
{
	struct mpsd_cast gone = { 0 };
	CUstream origin = mpsd_native(session->graph->origin);
	/* The thread that goes on, and ends it, is another one than this. */
	CUresult result = inner_cuStreamBeginCapture_v2(origin, CU_STREAM_CAPTURE_MODE_RELAXED);

	for (unsigned int i = 0; i < session->graph->count && result == CUDA_SUCCESS; i++) {
		struct mpsd_node *node = &session->graph->nodes[i];

		result = mpsd_cast_issue_known(&gone, node->op, &node->native);
	}
	mpsd_cast_end(&gone);
	session->id = mpsd_capture_of(origin);
	return result;
}

/* The program hears of it by what it does next with that capture, which in this copy ends now, if it had begun. */
static void make_void(struct session *session)
{
	CUgraph graph = NULL;

	inner_cuStreamEndCapture(mpsd_native(session->graph->origin), &graph);
	if (graph)
		real_cuGraphDestroy(graph);
	session->is_void = true;
	session->id = 0;
}

void mpsd_captures_move(void)
{
	pthread_mutex_lock(&lock);
	for (struct session *session = sessions; session; session = session->next) {
		CUresult result = session->is_void ? CUDA_SUCCESS : go_on(session);

		/* In the context after one that is lost already it goes on. */
		if (result == CUDA_SUCCESS || mpsd_is_loss(result))
			continue;
		make_void(session);
		mpsd_line_opaque("a capture that does not go on");
	}
	pthread_mutex_unlock(&lock);
}

void mpsd_captures_child(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	mpsd_joins_child();
	atomic_store(&mpsd_captures, 0);
}
