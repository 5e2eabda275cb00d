// SPDX-License-Identifier: MIT
#include "failover/graph.h"

#include <stdlib.h>
#include <string.h>

#include "exact/state.h"
#include "failover/line.h"
#include "failover/session.h"

static cuuint64_t last_name;

static struct mpsd_session *session_of(cuuint64_t id)
{
	struct mpsd_session *session = id ? mpsd_sessions : NULL;

	while (session && session->id != id)
		session = session->next;
	return session;
}

/* The capture in which an event was recorded last: whoever waits for it joins that. Of an invalid one the driver tells. */
static struct mpsd_session *session_of_event(CUevent event)
{
	for (struct mpsd_session *session = mpsd_sessions; session; session = session->next)
		for (unsigned int i = 0; i < session->graph->count; i++)
			if (session->graph->nodes[i].op->kind == MPSD_OP_RECORD && !session->is_spoiled &&
			    !mpsd_op_is_event_node(session->graph->nodes[i].op) &&
			    session->graph->nodes[i].op->event.event == event &&
			    !session->graph->nodes[i].op->event.is_elsewhere)
				return session;
	return NULL;
}

/* One that is in no copy, or that the driver has made invalid, says no id: it is known by the stream where it began. */
static struct mpsd_session *session_from(CUstream origin, bool is_void)
{
	struct mpsd_session *session = mpsd_sessions;

	while (session && (session->is_void != is_void || session->graph->origin != origin))
		session = session->next;
	return session;
}

static bool is_in(const struct mpsd_session *session, CUstream stream)
{
	bool is = session->graph->origin == stream;

	for (unsigned int i = 0; i < session->graph->count && !is; i++)
		is = session->graph->nodes[i].op->stream == stream;
	return is;
}

/* Whatever comes into it fails. */
static bool is_invalid(const struct mpsd_session *session)
{
	return session->is_void || session->is_spoiled;
}

static struct mpsd_session *invalid_session_of(CUstream stream)
{
	struct mpsd_session *session = mpsd_sessions;

	while (session && !(is_invalid(session) && is_in(session, stream)))
		session = session->next;
	return session;
}

/* Under the lock. What a capture has to do with the event from now on has nothing to do with what it had before. */
static void part_with(CUevent event)
{
	for (struct mpsd_session *session = mpsd_sessions; session; session = session->next)
		for (unsigned int i = 0; i < session->graph->count; i++) {
			struct mpsd_op *op = session->graph->nodes[i].op;

			if ((op->kind == MPSD_OP_RECORD || op->kind == MPSD_OP_WAIT) && op->event.event == event &&
			    !mpsd_op_is_event_node(op))
				op->event.is_elsewhere = true;
		}
}

void mpsd_captures_without_event(CUevent event)
{
	if (!mpsd_capturing())
		return;
	mpsd_sessions_lock();
	part_with(event);
	mpsd_sessions_unlock();
}

bool mpsd_is_in_invalid_capture(CUstream stream)
{
	bool is;

	if (!mpsd_capturing())
		return false;
	mpsd_sessions_lock();
	is = invalid_session_of(stream) != NULL;
	mpsd_sessions_unlock();
	return is;
}

static CUresult find_session(const struct mpsd_op *op, struct mpsd_session **session)
{
	cuuint64_t id;
	CUresult result = mpsd_capture_ask(mpsd_native(op->stream), &id);

	*session = id ? session_of(id) : invalid_session_of(op->stream);
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
	bool is_node = (op->kind != MPSD_OP_RECORD && op->kind != MPSD_OP_WAIT) || mpsd_op_is_event_node(op);
	struct mpsd_node node = { .op = op, .native = is_node ? mpsd_capture_last(mpsd_native(op->stream)) : NULL };

	return mpsd_graph_append(graph, node) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Edges that kernels make: in another copy they would be of others than the program's events. */
static bool is_of_events(const struct mpsd_op *op)
{
	return op->kind == MPSD_OP_LAUNCH && mpsd_launch_records_event(op);
}

/* One that waits for an event by whose name something was captured: is it in that capture now? */
static bool has_joined(const struct mpsd_op *op, const struct mpsd_session *session)
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
	struct mpsd_session *session;
	CUresult said;

	mpsd_sessions_lock();
	said = find_session(op, &session);
	/* Done again beside captures, or in this one, it is not done once more by another that goes on. */
	if (op->kind == MPSD_OP_RECORD && !mpsd_op_is_event_node(op))
		part_with(op->event.event);
	/* What may be for a capture must not be noted as done beside it: the next copy says which it is. */
	is = session || mpsd_is_loss(said);
	if (is) {
		lend(op);
		*result = !session ? said : is_invalid(session) ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : issue(op);
		if (mpsd_is_left())
			*result = MPSD_AGAIN;
		/* It is given once more, beside all captures. */
		is = *result != CUDA_SUCCESS || has_joined(op, session);
		if (is && *result == CUDA_SUCCESS) {
			*result = append(session->graph, op);
			mpsd_work_captured();
		} else if (is) {
			mpsd_op_free(op);
		}
	}
	mpsd_sessions_unlock();
	if (is && is_opaque && *result == CUDA_SUCCESS)
		mpsd_line_opaque("a captured kernel that records an event");
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

/* What is there when the copy is left goes on in the next one, and is not begun again. */
static bool enter_session(struct mpsd_session *session)
{
	bool is;

	mpsd_sessions_lock();
	is = !mpsd_is_left();
	if (is) {
		session->id = mpsd_capture_of(mpsd_native(session->graph->origin));
		/* Another copy of the driver counts anew. */
		session->name = mpsd_tables()->moves ? last_name + 1 : session->id;
		last_name = session->name > last_name ? session->name : last_name;
		session->next = mpsd_sessions;
		mpsd_sessions = session;
	}
	mpsd_sessions_unlock();
	return is;
}

/* Takes the session; NULL: there was no memory. */
static CUresult begin(struct mpsd_session *session, CUstreamCaptureMode mode)
{
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
	bool held;

	/* First: who marks other streams, or looks at them, asks from here on. */
	atomic_fetch_add(&mpsd_captures, 1);
	if (session)
		result = mpsd_exact() ? prove_before(session->graph->origin) : CUDA_SUCCESS;
	if (result == CUDA_SUCCESS) {
		held = mpsd_joins_take();
		result = mpsd_session_begin(session, mode);
		if (held)
			mpsd_captures_let();
	}
	if (result == CUDA_SUCCESS && !enter_session(session))
		result = MPSD_AGAIN;
	if (result != CUDA_SUCCESS) {
		atomic_fetch_sub(&mpsd_captures, 1);
		mpsd_session_free(session);
	}
	return result;
}

static struct mpsd_session *new_session(CUstream stream)
{
	struct mpsd_session *session = calloc(1, sizeof(*session));

	if (session)
		session->graph = mpsd_graph_new(stream, false);
	if (session && session->graph)
		return session;
	free(session);
	return NULL;
}

CUresult make_cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode)
{
	return begin(new_session(hStream), mode);
}

/* Copies, as the program may change what it gave. False: no memory. */
static bool begin_behind(struct mpsd_session *session, const CUgraphNode *after, const CUgraphEdgeData *edges,
			 size_t count)
{
	bool is_plain = mpsd_edges_are_plain(edges, count);

	session->count = count;
	session->after = malloc((count + 1) * sizeof(*after));
	session->edges = is_plain ? NULL : malloc(count * sizeof(*edges));
	if (!session->after || (!is_plain && !session->edges))
		return false;
	if (count)
		memcpy(session->after, after, count * sizeof(*after));
	if (!is_plain)
		memcpy(session->edges, edges, count * sizeof(*edges));
	return true;
}

CUresult make_cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
					  const CUgraphEdgeData *dependencyData, size_t numDependencies,
					  CUstreamCaptureMode mode)
{
	struct mpsd_session *session;

	if (!hGraph || (numDependencies && !dependencies))
		return mpsd_answered(real_cuStreamBeginCaptureToGraph(mpsd_native(hStream), mpsd_native(hGraph), NULL, NULL,
								      numDependencies, mode));
	session = new_session(hStream);
	if (session)
		session->into = hGraph;
	if (session && !begin_behind(session, dependencies, dependencyData, numDependencies)) {
		mpsd_session_free(session);
		session = NULL;
	}
	return begin(session, mode);
}

CUresult mpsd_capture_tell(CUresult result, CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id)
{
	struct mpsd_session *session;
	cuuint64_t native;

	if (!mpsd_capturing() || result != CUDA_SUCCESS)
		return mpsd_answered(result);
	native = mpsd_capture_of(mpsd_native(stream));
	mpsd_sessions_lock();
	session = native ? session_of(native) : invalid_session_of(stream);
	if (session && session->is_void && status)
		*status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
	if (session && id)
		*id = session->name;
	mpsd_sessions_unlock();
	return mpsd_answered(result);
}

static struct mpsd_session *take(struct mpsd_session *session)
{
	struct mpsd_session **link = &mpsd_sessions;

	while (*link && *link != session)
		link = &(*link)->next;
	if (!*link)
		return NULL;
	*link = session->next;
	atomic_fetch_sub(&mpsd_captures, 1);
	return session;
}

static void end_session(struct mpsd_session *session)
{
	mpsd_session_free(take(session));
}

/* What was captured in it is in no stream of the program's: its name may be another's soon. */
static void part_from(const struct mpsd_session *session, CUstream stream)
{
	CUstream nobodys = NULL;

	for (unsigned int i = 0; i < session->graph->count; i++) {
		struct mpsd_op *op = session->graph->nodes[i].op;

		if (op->stream != stream)
			continue;
		/* One for all of it. */
		nobodys = nobodys ? nobodys : (CUstream)op;
		op->stream = nobodys;
	}
}

void mpsd_captures_without(CUstream stream)
{
	struct mpsd_session *session, *next;

	if (!mpsd_capturing())
		return;
	mpsd_sessions_lock();
	for (session = mpsd_sessions; session; session = next) {
		next = session->next;
		if (session->graph->origin == stream)
			end_session(session);
		else
			part_from(session, stream);
	}
	mpsd_sessions_unlock();
}

static bool is_void(CUstream origin, CUresult *result)
{
	struct mpsd_session *session = session_from(origin, true);

	if (session)
		*result = mpsd_is_left() ? MPSD_AGAIN : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	if (session && *result != MPSD_AGAIN)
		end_session(session);
	return session != NULL;
}

/* Its graph is known by the program's name for it from now on. */
static CUresult note_end(CUresult result, const struct mpsd_session *session, CUgraph *graph, uint64_t moves)
{
	if (session->into) {
		if (result == CUDA_SUCCESS)
			*graph = session->into;
		return mpsd_captured_into(result, session->into, session->graph);
	}
	mpsd_graph_hold(session->graph);
	return mpsd_graph_note(result, MPSD_MADE_GRAPH, (void **)graph, session->graph, 0, moves);
}

CUresult make_cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
{
	uint64_t moves = mpsd_tables()->moves;
	struct mpsd_session *session;
	CUresult result;

	mpsd_sessions_lock();
	session = session_of(mpsd_capture_of(mpsd_native(hStream)));
	if (!session)
		session = session_from(hStream, false);
	if (!is_void(hStream, &result))
		result = inner_cuStreamEndCapture(mpsd_native(hStream), phGraph);
	else if (phGraph)
		*phGraph = NULL;
	if (session && mpsd_is_left()) {
		/* It goes on in the next copy, and is ended there. */
		result = MPSD_AGAIN;
	} else if (session && !mpsd_is_loss(result) &&
		   mpsd_capture_status(mpsd_native(hStream)) == CU_STREAM_CAPTURE_STATUS_NONE) {
		result = note_end(result, session, phGraph, moves);
		/* Overtaken since, it is still there for the move to go on with. */
		if (result != MPSD_AGAIN)
			end_session(session);
	}
	mpsd_sessions_unlock();
	return result;
}
