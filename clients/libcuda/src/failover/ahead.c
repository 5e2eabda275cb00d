// SPDX-License-Identifier: MIT
/*
 * Executable graphs, put together in the standby before they are needed there, for that takes memory of the GPU's, which
 * the resource manager gives to nobody while it is at a fault. What is not there in time is made when it is launched.
 */
#include "failover/ahead.h"

#include <stdlib.h>

#include "exact/state.h"
#include "failover/line.h"
#include "failover/nodes.h"

#define MOST_CHANGES 4		/* then it is not followed any more: each one is a graph to be put together */

/* Calls lead to the standby's copy, and names to twins. */
static const struct mpsd_tables standbys = { mpsd_other, mpsd_other, 1 };

static bool is_due(const struct mpsd_made *made)
{
	return made->kind == MPSD_MADE_EXEC && made->graph && made->changes <= MOST_CHANGES &&
	       (!made->twin || made->is_stale);
}

static void end_twin(struct mpsd_made *made)
{
	if (!made->twin)
		return;
	other_cuGraphExecDestroy(made->twin);
	if (made->twin_put.graph)
		other_cuGraphDestroy(made->twin_put.graph);
	mpsd_ahead_forget(made);
}

static bool enter(CUdevice device)
{
	const struct mpsd_made *context = mpsd_made_context(device);

	return context && context->is_twin && other_cuCtxSetCurrent(context->twin) == CUDA_SUCCESS;
}

/* The oldest that is to be made, held, in its context; NULL: there is none. */
static struct mpsd_made *hold_one(struct mpsd_graph **graph)
{
	struct mpsd_made *made;

	mpsd_made_lock();
	made = mpsd_made_oldest();
	while (made && !(is_due(made) && enter(made->device)))
		made = made->newer;
	if (made) {
		end_twin(made);
		*graph = mpsd_graph_hold(made->graph);
		mpsd_made_hold(made);
	}
	mpsd_made_unlock();
	return made;
}

static void let_go(struct mpsd_made *made, CUresult result, CUgraphExec exec, struct mpsd_put *put)
{
	bool is;

	mpsd_made_lock();
	is = mpsd_made_let_go() && result == CUDA_SUCCESS;
	if (is) {
		made->twin = exec;
		made->twin_put = *put;
	} else if (result != CUDA_SUCCESS) {
		/* It is not tried for ever. */
		made->changes++;
	}
	mpsd_made_unlock();
	if (is || result != CUDA_SUCCESS)
		return;
	other_cuGraphExecDestroy(exec);
	other_cuGraphDestroy(put->graph);
	mpsd_put_forget(put);
}

bool mpsd_ahead_make(void)
{
	struct mpsd_graph *graph;
	struct mpsd_made *made;
	struct mpsd_put put;
	CUgraphExec exec;
	CUresult result;

	/* In a move there is no time for it. */
	if (atomic_load(&mpsd_moves) & 1 || !(made = hold_one(&graph)))
		return false;
	mpsd_thread.tables = &standbys;
	mpsd_thread_is_ahead = true;
	result = mpsd_exec_make(graph, made->flags, &exec, &put);
	mpsd_thread_is_ahead = false;
	mpsd_thread.tables = NULL;
	/* Its memory is taken here, and not by its first launch. */
	if (result == CUDA_SUCCESS && mpsd_other[MPSD_cuGraphUpload])
		other_cuGraphUpload(exec, CU_STREAM_LEGACY);
	let_go(made, result, exec, &put);
	mpsd_graph_let_go(graph);
	return true;
}

void mpsd_ahead_changed(struct mpsd_made *made)
{
	if (made->kind != MPSD_MADE_EXEC)
		return;
	mpsd_made_changed(made);
	made->changes++;
	made->is_stale = made->twin != NULL;
	mpsd_line_wake();
}

void mpsd_ahead_end(struct mpsd_made *made)
{
	if (made->kind == MPSD_MADE_EXEC)
		end_twin(made);
}

void mpsd_ahead_forget(struct mpsd_made *made)
{
	mpsd_put_forget(&made->twin_put);
	made->twin = NULL;
	made->is_stale = false;
}

void mpsd_ahead_move(struct mpsd_made *made)
{
	if (made->is_stale)
		mpsd_ahead_forget(made);
	mpsd_put_forget(&made->put);
	made->put = made->twin_put;
	made->twin_put = (struct mpsd_put){ .graph = NULL };
	made->changes = 0;
}

bool mpsd_ahead_needs(const struct mpsd_made *made, const struct mpsd_made *other)
{
	return made && other && (made->kind == MPSD_MADE_EXEC || made->kind == MPSD_MADE_CONTEXT) &&
	       other->kind <= MPSD_MADE_KERNEL_FUNCTION && other->kind >= MPSD_MADE_MODULE;
}
