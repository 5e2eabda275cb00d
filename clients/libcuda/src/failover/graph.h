/* SPDX-License-Identifier: MIT */
/*
 * Graphs. What was captured is noted as operations (src/exact/state.h), and captured anew in another copy of the driver; a
 * capture that a move overtakes goes on there. What was made node by node is made so again (nodes.h).
 */
#pragma once

#include "exact/exact.h"
#include "failover/made.h"

struct mpsd_op;
struct mpsd_graph;

/* Whether any capture is under way. */
static inline bool mpsd_capturing(void)
{
	return __builtin_expect(atomic_load_explicit(&mpsd_captures, memory_order_relaxed) != 0, 0);
}

/*
 * Whether the operation goes into a capture; then it has been given to the driver, `result` is what that said, and
 * the operation is taken. So it is where a lost context does not let that be known: `result` is the loss.
 */
bool mpsd_capture_op(struct mpsd_op *op, CUresult *result);

/* What comes into one that could not go on fails; without the driver, which does not know that one any more. */
bool mpsd_is_in_invalid_capture(CUstream stream);

/* The event has been recorded elsewhere, or is no more. */
void mpsd_captures_without_event(CUevent event);

/* What a driver's answer about a stream's capture is to the program: after moves it goes by the name it began with. */
CUresult mpsd_capture_tell(CUresult result, CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id);

/* joins.c. Id 0: the stream is in none; a loss is said, whatever is captured. */
CUresult mpsd_capture_ask(CUstream native, cuuint64_t *id);
cuuint64_t mpsd_capture_of(CUstream native);

bool mpsd_is_in_capture(CUstream stream);
bool mpsd_is_native_in_capture(CUstream native);	/* what this call's copy calls it */
CUstreamCaptureStatus mpsd_capture_status(CUstream native);	/* NONE, too, where the driver does not say */

/* Until let() the stream joins no capture, if it is held. False: it is in one, and nothing is to be let. */
bool mpsd_captures_hold(CUstream native, bool *held);
void mpsd_captures_let(void);

/* SUCCESS: it is in one; NOT_SUPPORTED: in none; or the loss of the context. */
CUresult mpsd_capture_joined(CUstream native);

/* Around what makes a stream join one. False: it is not waited for, and nothing is to be let. */
bool mpsd_joins_take(void);
void mpsd_joins_child(void);

/* is_in_capture() for who is inside no copy, which could be unloaded before it answers. */
bool mpsd_is_in_capture_outside(CUstream stream);

static inline bool mpsd_is_captured(CUstream stream)
{
	return mpsd_capturing() && mpsd_is_in_capture(stream);
}

/* The program's graph in the copy of this call, made there if it is not there yet. */
CUresult mpsd_graph_native(CUgraph name, CUgraph *native);
CUresult mpsd_exec_native(CUgraphExec name, CUgraphExec *native);

/* What its launch does depends on what is done: it cannot be given part by part. */
bool mpsd_graph_is_conditional(const struct mpsd_graph *graph);

/* Launched by an executable graph of its own, in that stream of the copy of this call. */
CUresult mpsd_exec_launch_once(const struct mpsd_graph *graph, CUstream stream);

/* What a graph to be launched consists of (mpsd_made_graph()). */
CUresult mpsd_graph_each(const struct mpsd_graph *graph, CUresult (*call)(const struct mpsd_op *op, void *with), void *with);
/* The same of one that records events, waits for them, or for words in memory; nothing of another one. */
void mpsd_graph_each_special(const struct mpsd_graph *graph, CUresult (*call)(const struct mpsd_op *op, void *with));
bool mpsd_graph_has_host(const struct mpsd_graph *graph);	/* it reads or writes memory of the host's */
struct mpsd_graph *mpsd_graph_hold(struct mpsd_graph *graph);
void mpsd_graph_let_go(struct mpsd_graph *graph);

/* The stream ends, and what is captured in it. */
void mpsd_captures_without(CUstream stream);

/* Of any call, when it is over: whether it has made captures invalid. */
void mpsd_captures_refused(CUresult result);

/* In a move, in the copy that comes into use, with its context current: captures under way go on. */
void mpsd_captures_move(void);
void mpsd_captures_child(void);
