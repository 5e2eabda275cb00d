// SPDX-License-Identifier: MIT
/* What an operation wants saved before it is submitted. */
#include "exact/params.h"
#include "exact/readers.h"
#include "exact/undo.h"
#include "failover/graph.h"

static CUresult plan_for_graph(const struct mpsd_op *op, struct mpsd_plan *plan);

static CUresult plan_for(const struct mpsd_op *op, void *with)
{
	struct mpsd_plan *plan = with;

	switch (op->kind) {
	case MPSD_OP_LAUNCH:
		return mpsd_params_save(op, plan);
	case MPSD_OP_COPY:
		/* What the old copy writes there nothing ends that takes the GPU's memory from it. */
		if (op->copy.is_from_host && op->copy.is_for_host && mpsd_is_pinned((const void *)op->copy.to))
			mpsd_epoch_unsure("a copy within host memory");
		return op->copy.way == MPSD_COPY_OUT ? CUDA_SUCCESS : mpsd_rows_save(op, plan);
	case MPSD_OP_SET:
		if (op->set.is_outside)
			mpsd_epoch_unsure("a memset of memory outside the window");
		return mpsd_rows_save(op, plan);
	case MPSD_OP_MEMORY:
		return mpsd_memops_save(op->memory, plan);
	case MPSD_OP_CALL:
		mpsd_epoch_unsure("a graph with host callbacks");
		return CUDA_SUCCESS;
	case MPSD_OP_GRAPH:
		return plan_for_graph(op, plan);
	default:
		return CUDA_SUCCESS;
	}
}

/* All that it consists of, for it runs as one. */
static CUresult plan_for_graph(const struct mpsd_op *op, struct mpsd_plan *plan)
{
	if (mpsd_graph_has_host(op->graph.graph))
		mpsd_epoch_unsure("a graph with copies from or to the host");
	return mpsd_graph_each(op->graph.graph, plan_for, plan);
}

static struct mpsd_plan plan_of(const struct mpsd_op *op)
{
	static atomic_ullong plans;
	struct mpsd_plan plan = { .lane = op->lane, .number = 1 + atomic_fetch_add(&plans, 1) };

	if (op->kind == MPSD_OP_LAUNCH)
		plan.first = op->launch.function;
	else if (op->kind == MPSD_OP_GRAPH)
		plan.first = op->graph.exec;
	return plan;
}

static CUresult carry_out(struct mpsd_plan *plan, CUresult planned)
{
	CUresult done;

	if (planned != CUDA_SUCCESS && planned != CUDA_ERROR_OUT_OF_MEMORY) {
		mpsd_undo_drop(plan);
		return planned;
	}
	done = mpsd_undo_done(plan);
	mpsd_undo_drop(plan);
	return done == CUDA_SUCCESS ? planned : done;
}

CUresult mpsd_plan_save(const struct mpsd_op *op)
{
	struct mpsd_plan plan = plan_of(op);

	return carry_out(&plan, plan_for(op, &plan));
}

/* First what may be written. Of what is only read sums are taken even so: when they are there it need not be saved. */
CUresult mpsd_plan_save_what_fits(const struct mpsd_op *op, bool *is_short)
{
	struct mpsd_plan plan = plan_of(op);
	CUresult result;

	plan.part = MPSD_PLAN_WRITES;
	result = plan_for(op, &plan);
	plan.part = MPSD_PLAN_READS;
	if (result == CUDA_SUCCESS)
		result = plan_for(op, &plan);
	*is_short = plan.is_short;
	return carry_out(&plan, result);
}

CUresult mpsd_plan_count(const struct mpsd_op *op, uint64_t *bytes, uint64_t *by_leads)
{
	struct mpsd_plan plan = plan_of(op);
	CUresult result;

	plan.part = MPSD_PLAN_COUNTS;
	result = plan_for(op, &plan);
	*bytes = plan.bytes;
	*by_leads = plan.by_leads;
	return result;
}

CUresult mpsd_plan_note(const struct mpsd_op *op)
{
	struct mpsd_plan plan = plan_of(op);

	plan.part = MPSD_PLAN_NOTES;
	return mpsd_readers_any ? plan_for(op, &plan) : CUDA_SUCCESS;
}
