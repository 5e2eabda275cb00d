// SPDX-License-Identifier: MIT
/* The program's calls that say what a node of a graph is. What cannot be followed the driver is told as it is. */
#include <stdlib.h>

#include "exact/params.h"
#include "exact/state.h"
#include "failover/embedded.h"
#include "failover/line.h"
#include "failover/nodes.h"

#define NOT_FOLLOWED "a graph node of an untracked type"

/* After the driver was told: the program is not carried over, unless nothing came of it. */
static CUresult passed(CUresult result, const char *why)
{
	result = mpsd_line_made(result, why);
	return mpsd_is_left() ? MPSD_AGAIN : result;
}

/* What is missing is missing in any copy. */
static CUresult refused(CUresult result, const char *why)
{
	if (result == CUDA_ERROR_INVALID_VALUE)
		return result;
	mpsd_line_opaque(why);
	return CUDA_ERROR_NOT_SUPPORTED;
}

/* The kind by its name, for the program's status. */
static const char *why_not(const CUgraphNodeParams *given)
{
	switch (given ? (int)given->type : -1) {
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
		return "a memory allocation node in a graph";
	case CU_GRAPH_NODE_TYPE_MEM_FREE:
		return "a memory free node in a graph";
	case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
	case CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT:
		return "an external semaphore node in a graph";
	case CU_GRAPH_NODE_TYPE_CONDITIONAL:
		return "a conditional node in a graph";
	default:
		return NOT_FOLLOWED;
	}
}

/* In another copy than the first one its handles would lead astray. */
#define PASS_WHY(result, why, call)								\
	(mpsd_is_loss(result) || (result) == MPSD_AGAIN ? (result)				\
	 : mpsd_tables()->moves			      ? refused(result, why)			\
						      : passed(call, why))

#define PASS(result, call) PASS_WHY(result, NOT_FOLLOWED, call)

/* What a node was until now: of a graph, or of an executable one. */
struct before {
	struct mpsd_op *op;		/* shared; NULL: it is not known, or is none */
	CUcontext context;
};

static struct before look_before(const void *name, CUgraphNode node)
{
	struct mpsd_graph *graph = mpsd_made_graph(name);
	unsigned int number = graph ? mpsd_graph_number(graph, node) : 0;
	struct before before = { NULL, NULL };
	const struct mpsd_node *found = NULL;

	if (graph)
		found = number < graph->count ? &graph->nodes[number] : mpsd_embedded_find(graph, node);
	if (found) {
		before.op = found->op;
		before.context = found->context;
	}
	if (before.op)
		mpsd_op_share(before.op);
	mpsd_graph_let_go(graph);
	return before;
}

static void forget_before(struct before before)
{
	if (before.op)
		mpsd_op_free(before.op);
}

/* Where the call says nothing of it, it is the current one, which may be another by then. */
static CUcontext or_current(CUcontext given)
{
	CUcontext current = NULL;

	if (!given && real_cuCtxGetCurrent(&current) == CUDA_SUCCESS)
		given = mpsd_name(current);
	return given;
}

/* What each kind is. Else than SUCCESS there is none. */

static CUresult kernel(const CUDA_KERNEL_NODE_PARAMS *given, const struct mpsd_op *before, struct mpsd_node *node)
{
	CUresult result;
	struct mpsd_launch launch = { .is_plain = true };
	CUlaunchConfig config;

	if (!given)
		return CUDA_ERROR_INVALID_VALUE;
	launch.function = given->func ? given->func : (CUfunction)given->kern;
	launch.config = &config;
	config = (CUlaunchConfig){ given->gridDimX, given->gridDimY, given->gridDimZ, given->blockDimX, given->blockDimY,
				   given->blockDimZ, given->sharedMemBytes, NULL, NULL, 0 };
	/* What its attributes say of it a buffer of parameters is not launched with. */
	if (before && before->kind == MPSD_OP_LAUNCH && before->launch.is_cooperative && given->extra)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (before && before->kind == MPSD_OP_LAUNCH) {
		launch.stream = before->stream;
		config.attrs = before->launch.attributes;
		config.numAttrs = before->launch.config.numAttrs;
		launch.is_plain = before->launch.is_plain;
		launch.is_cooperative = before->launch.is_cooperative;
	}
	*node = (struct mpsd_node){ .context = given->func ? given->ctx : or_current(given->ctx) };
	result = mpsd_params_take(&launch, given->kernelParams, given->extra, &node->op);
	/* A function that a move has overtaken is unknown for that alone. */
	return result != CUDA_SUCCESS && atomic_load(&mpsd_moves) != mpsd_tables()->moves ? MPSD_AGAIN : result;
}

static CUresult made(struct mpsd_op *op, const struct mpsd_op *before, CUcontext context, struct mpsd_node *node)
{
	*node = (struct mpsd_node){ .op = op, .context = context };
	if (op && before)
		op->stream = before->stream;
	return op ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult copy(const CUDA_MEMCPY3D *given, CUcontext context, const struct mpsd_op *before,
		     struct mpsd_node *node)
{
	return given ? made(mpsd_rows_of_node(given), before, context, node) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult set(const CUDA_MEMSET_NODE_PARAMS *given, CUcontext context, const struct mpsd_op *before,
		    struct mpsd_node *node)
{
	return given ? made(mpsd_set_of_node(given), before, context, node) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult child(CUgraph given, CUgraph *native, struct mpsd_node *node)
{
	CUresult result = mpsd_graph_native(given, native);

	*node = (struct mpsd_node){ .child = result == CUDA_SUCCESS ? mpsd_embedded_snapshot(given) : NULL };
	return result != CUDA_SUCCESS || node->child ? result : CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult host(const CUDA_HOST_NODE_PARAMS *given, const struct mpsd_op *before, struct mpsd_node *node)
{
	if (!given || !given->fn)
		return CUDA_ERROR_INVALID_VALUE;
	return made(mpsd_call_of_node(given->fn, given->userData), before, NULL, node);
}

static CUresult memory(const CUDA_BATCH_MEM_OP_NODE_PARAMS *given, const struct mpsd_op *before, struct mpsd_node *node)
{
	return given ? made(mpsd_memops_of_node(given), before, given->ctx, node) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult event(CUevent given, enum mpsd_op_kind kind, const struct mpsd_op *before, struct mpsd_node *node)
{
	struct mpsd_op *op = given ? calloc(1, sizeof(*op)) : NULL;

	if (!op)
		return given ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
	op->kind = kind;
	op->event.event = given;
	op->event.flags = kind == MPSD_OP_RECORD ? CU_EVENT_RECORD_EXTERNAL : CU_EVENT_WAIT_EXTERNAL;
	op->event.is_flagged = kind == MPSD_OP_RECORD;
	return made(op, before, NULL, node);
}

/* Behind the function and its argument: how it waits, and a context. cuda.h before 13.0 lacks both. */
static CUresult any_of_host(const CUgraphNodeParams *given, const struct mpsd_op *before, struct mpsd_node *node)
{
	const CUDA_HOST_NODE_PARAMS plain = { given->host.fn, given->host.userData };

	/* The calls by which it is made again have none of these. */
	return (uint32_t)given->reserved1[2] || given->reserved1[3] ? CUDA_ERROR_NOT_SUPPORTED : host(&plain, before, node);
}

static CUresult any_of_memory(const CUDA_BATCH_MEM_OP_NODE_PARAMS_v2 *given, const struct mpsd_op *before,
			      struct mpsd_node *node)
{
	const CUDA_BATCH_MEM_OP_NODE_PARAMS plain = { or_current(given->ctx), given->count, given->paramArray,
						      given->flags };

	return memory(&plain, before, node);
}

static CUresult any(const CUgraphNodeParams *given, const struct mpsd_op *before, struct mpsd_node *node, CUgraph *native)
{
	const CUDA_KERNEL_NODE_PARAMS_v3 *k = &given->kernel;
	const CUDA_KERNEL_NODE_PARAMS launch = {
		k->func, k->gridDimX, k->gridDimY, k->gridDimZ, k->blockDimX, k->blockDimY, k->blockDimZ,
		k->sharedMemBytes, k->kernelParams, k->extra, k->kern, k->ctx,
	};
	const CUDA_MEMSET_NODE_PARAMS_v2 *s = &given->memset;
	const CUDA_MEMSET_NODE_PARAMS memset = { s->dst, s->pitch, s->value, s->elementSize, s->width, s->height };

	/* cuda.h: they are zero, or the driver is asked for what is not known here. */
	if (given->reserved0[0] || given->reserved0[1] || given->reserved0[2] || given->reserved2)
		return CUDA_ERROR_NOT_SUPPORTED;
	switch (given->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		return kernel(&launch, before, node);
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		if (given->memcpy.flags || given->memcpy.reserved)
			return CUDA_ERROR_NOT_SUPPORTED;
		return copy(&given->memcpy.copyParams, or_current(given->memcpy.copyCtx), before, node);
	case CU_GRAPH_NODE_TYPE_MEMSET:
		return set(&memset, or_current(s->ctx), before, node);
	case CU_GRAPH_NODE_TYPE_GRAPH:
		return mpsd_node_ownership_of(given) ? CUDA_ERROR_NOT_SUPPORTED : child(given->graph.graph, native, node);
	case CU_GRAPH_NODE_TYPE_HOST:
		return any_of_host(given, before, node);
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
		return any_of_memory(&given->memOp, before, node);
	case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
		return event(given->eventRecord.event, MPSD_OP_RECORD, before, node);
	case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
		return event(given->eventWait.event, MPSD_OP_WAIT, before, node);
	case CU_GRAPH_NODE_TYPE_EMPTY:
		*node = (struct mpsd_node){ .op = NULL };
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}

/* Takes what it has of its own: cuda.h says so of cuGraphAddNode() alone. */
static CUresult own(const CUgraphNodeParams *given, struct mpsd_node *node, CUgraph *native)
{
	bool is_moved = given->type == CU_GRAPH_NODE_TYPE_GRAPH;
	struct mpsd_graph *graph = is_moved ? mpsd_made_graph(given->graph.graph) : NULL;
	CUresult result = is_moved ? mpsd_graph_native(given->graph.graph, native) : CUDA_SUCCESS;
	struct mpsd_embedded *embedded;

	mpsd_graph_let_go(graph);
	if (result != CUDA_SUCCESS || (is_moved && !graph))
		return result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_SUPPORTED;
	/* What the driver refuses it is to refuse. */
	embedded = mpsd_embedded_new(is_moved ? 1 : given->conditional.size);
	if (!embedded)
		return CUDA_ERROR_OUT_OF_MEMORY;
	embedded->is_moved = is_moved;
	if (is_moved) {
		embedded->names[0] = given->graph.graph;
	} else {
		embedded->handle = given->conditional.handle;
		embedded->type = given->conditional.type;
	}
	*node = (struct mpsd_node){ .embedded = embedded, .context = is_moved ? NULL : given->conditional.ctx };
	return CUDA_SUCCESS;
}

/* As `any`, of a node that is added. */
static CUresult added(const CUgraphNodeParams *given, struct mpsd_node *node, CUgraph *native)
{
	bool is_moved = given->type == CU_GRAPH_NODE_TYPE_GRAPH && mpsd_node_ownership_of(given) == MPSD_NODE_OWNS;
	bool has_reserved = given->reserved0[0] || given->reserved0[1] || given->reserved0[2] || given->reserved2;
	bool is_known = is_moved || (given->type == CU_GRAPH_NODE_TYPE_CONDITIONAL && given->conditional.size);

	return is_known && !has_reserved ? own(given, node, native) : any(given, NULL, node, native);
}

/* Added */

#define ADD(result, native, call)										\
	((result) == CUDA_SUCCESS										\
		 ? mpsd_node_add(&(struct mpsd_addition){ phGraphNode, hGraph, dependencies, numDependencies, NULL, NULL }, \
				 node, native)										\
		 : PASS(result, call))

CUresult make_cuGraphAddKernelNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				      size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
	struct mpsd_node node;
	CUresult result = kernel(nodeParams, NULL, &node);

	return ADD(result, NULL,
		   inner_cuGraphAddKernelNode_v2(phGraphNode, hGraph, dependencies, numDependencies, nodeParams));
}

CUresult make_cuGraphAddMemcpyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				   size_t numDependencies, const CUDA_MEMCPY3D *copyParams, CUcontext ctx)
{
	struct mpsd_node node;
	CUresult result = copy(copyParams, ctx, NULL, &node);

	return ADD(result, NULL,
		   inner_cuGraphAddMemcpyNode(phGraphNode, hGraph, dependencies, numDependencies, copyParams, ctx));
}

CUresult make_cuGraphAddMemsetNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				   size_t numDependencies, const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx)
{
	struct mpsd_node node;
	CUresult result = set(memsetParams, ctx, NULL, &node);

	return ADD(result, NULL,
		   inner_cuGraphAddMemsetNode(phGraphNode, hGraph, dependencies, numDependencies, memsetParams, ctx));
}

CUresult make_cuGraphAddEmptyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				  size_t numDependencies)
{
	const struct mpsd_addition addition = { phGraphNode, hGraph, dependencies, numDependencies, NULL, NULL };

	return mpsd_node_add(&addition, (struct mpsd_node){ .op = NULL }, NULL);
}

CUresult make_cuGraphAddChildGraphNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				       size_t numDependencies, CUgraph childGraph)
{
	struct mpsd_node node;
	CUgraph native;
	CUresult result = child(childGraph, &native, &node);

	return ADD(result, native,
		   inner_cuGraphAddChildGraphNode(phGraphNode, hGraph, dependencies, numDependencies, childGraph));
}

CUresult make_cuGraphAddHostNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				 size_t numDependencies, const CUDA_HOST_NODE_PARAMS *nodeParams)
{
	struct mpsd_node node;
	CUresult result = host(nodeParams, NULL, &node);

	return ADD(result, NULL,
		   inner_cuGraphAddHostNode(phGraphNode, hGraph, dependencies, numDependencies, nodeParams));
}

CUresult make_cuGraphAddBatchMemOpNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				       size_t numDependencies, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)
{
	struct mpsd_node node;
	CUresult result = memory(nodeParams, NULL, &node);

	return ADD(result, NULL,
		   inner_cuGraphAddBatchMemOpNode(phGraphNode, hGraph, dependencies, numDependencies, nodeParams));
}

#define ADD_EVENT(kind, function)								\
	struct mpsd_node node;									\
	CUresult result = event(of, kind, NULL, &node);					\
												\
	return ADD(result, NULL, function(phGraphNode, hGraph, dependencies, numDependencies, of))

CUresult make_cuGraphAddEventRecordNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
					size_t numDependencies, CUevent of)
{
	ADD_EVENT(MPSD_OP_RECORD, inner_cuGraphAddEventRecordNode);
}

CUresult make_cuGraphAddEventWaitNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				      size_t numDependencies, CUevent of)
{
	ADD_EVENT(MPSD_OP_WAIT, inner_cuGraphAddEventWaitNode);
}

/* Graphs of a conditional node are told by their names. */
static CUresult add_any(struct mpsd_addition *addition, CUgraphNodeParams *given, struct mpsd_node node, CUgraph native)
{
	CUgraph *bodies = NULL;
	CUresult result;

	addition->bodies = &bodies;
	result = mpsd_node_add(addition, node, native);
	if (result == CUDA_SUCCESS && given->type == CU_GRAPH_NODE_TYPE_CONDITIONAL)
		given->conditional.phGraph_out = bodies;
	return result;
}

CUresult make_cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				const CUgraphEdgeData *dependencyData, size_t numDependencies,
				CUgraphNodeParams *nodeParams)
{
	struct mpsd_addition addition = { phGraphNode, hGraph, dependencies, numDependencies, dependencyData, NULL };
	struct mpsd_node node;
	CUgraph native = NULL;
	CUresult result = nodeParams ? added(nodeParams, &node, &native) : CUDA_ERROR_INVALID_VALUE;

	if (result == CUDA_SUCCESS)
		return add_any(&addition, nodeParams, node, native);
	return PASS_WHY(result, why_not(nodeParams),
			inner_cuGraphAddNode_v2(phGraphNode, hGraph, dependencies, dependencyData, numDependencies,
						nodeParams));
}

CUresult make_cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
			     size_t numDependencies, CUgraphNodeParams *nodeParams)
{
	struct mpsd_addition addition = { phGraphNode, hGraph, dependencies, numDependencies, NULL, NULL };
	struct mpsd_node node;
	CUgraph native = NULL;
	CUresult result = nodeParams ? added(nodeParams, &node, &native) : CUDA_ERROR_INVALID_VALUE;

	if (result == CUDA_SUCCESS)
		return add_any(&addition, nodeParams, node, native);
	return PASS_WHY(result, why_not(nodeParams),
			inner_cuGraphAddNode(phGraphNode, hGraph, dependencies, numDependencies, nodeParams));
}

/* Something else from now on: in the graph, which executable graphs that are there do not see */

#define BECOME(graph_, find, call)									\
	struct before before = look_before(graph_, hNode);						\
	struct mpsd_node node;									\
	CUresult result = find;									\
												\
	result = result == CUDA_SUCCESS ? mpsd_node_become(hNode, node) : PASS(result, call);	\
	forget_before(before);										\
	return result

CUresult make_cuGraphKernelNodeSetParams_v2(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
	BECOME(mpsd_node_graph(hNode), kernel(nodeParams, before.op, &node),
	       inner_cuGraphKernelNodeSetParams_v2(hNode, nodeParams));
}

CUresult make_cuGraphMemcpyNodeSetParams(CUgraphNode hNode, const CUDA_MEMCPY3D *nodeParams)
{
	BECOME(mpsd_node_graph(hNode), copy(nodeParams, before.context, before.op, &node),
	       inner_cuGraphMemcpyNodeSetParams(hNode, nodeParams));
}

CUresult make_cuGraphMemsetNodeSetParams(CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS *nodeParams)
{
	BECOME(mpsd_node_graph(hNode), set(nodeParams, before.context, before.op, &node),
	       inner_cuGraphMemsetNodeSetParams(hNode, nodeParams));
}

CUresult make_cuGraphHostNodeSetParams(CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams)
{
	BECOME(mpsd_node_graph(hNode), host(nodeParams, before.op, &node),
	       inner_cuGraphHostNodeSetParams(hNode, nodeParams));
}

CUresult make_cuGraphBatchMemOpNodeSetParams(CUgraphNode hNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)
{
	BECOME(mpsd_node_graph(hNode), memory(nodeParams, before.op, &node),
	       inner_cuGraphBatchMemOpNodeSetParams(hNode, nodeParams));
}

CUresult make_cuGraphEventRecordNodeSetEvent(CUgraphNode hNode, CUevent of)
{
	BECOME(mpsd_node_graph(hNode), event(of, MPSD_OP_RECORD, before.op, &node),
	       inner_cuGraphEventRecordNodeSetEvent(hNode, of));
}

CUresult make_cuGraphEventWaitNodeSetEvent(CUgraphNode hNode, CUevent of)
{
	BECOME(mpsd_node_graph(hNode), event(of, MPSD_OP_WAIT, before.op, &node),
	       inner_cuGraphEventWaitNodeSetEvent(hNode, of));
}

/* What an embedded graph is cannot be set so. */
static CUresult any_but_graph(const CUgraphNodeParams *given, const struct mpsd_op *before, struct mpsd_node *node)
{
	CUgraph native = NULL;

	if (!given)
		return CUDA_ERROR_INVALID_VALUE;
	return given->type == CU_GRAPH_NODE_TYPE_GRAPH ? CUDA_ERROR_NOT_SUPPORTED : any(given, before, node, &native);
}

CUresult make_cuGraphNodeSetParams(CUgraphNode hNode, CUgraphNodeParams *nodeParams)
{
	BECOME(mpsd_node_graph(hNode), any_but_graph(nodeParams, before.op, &node),
	       inner_cuGraphNodeSetParams(hNode, nodeParams));
}

/* The same in an executable graph alone */

static CUresult change(CUgraphExec exec, CUgraphNode name, struct mpsd_node node, CUgraph native)
{
	CUresult result = mpsd_exec_change(exec, name, &node, native);

	mpsd_node_let_go(&node);
	return result;
}

/* The driver says what it thinks of a node that the executable graph does not know. */
#define CHANGE(find, native, call)								\
	struct before before = look_before(hGraphExec, hNode);					\
	struct mpsd_node node;									\
	CUresult result = find;									\
												\
	if (result == CUDA_SUCCESS)								\
		result = change(hGraphExec, hNode, node, native);				\
	else if (!mpsd_is_loss(result) && result != MPSD_AGAIN && result != CUDA_ERROR_INVALID_VALUE)	\
		result = CUDA_ERROR_NOT_FOUND;							\
	forget_before(before);										\
	return result == CUDA_ERROR_NOT_FOUND ? PASS(result, call) : result

CUresult make_cuGraphExecKernelNodeSetParams_v2(CUgraphExec hGraphExec, CUgraphNode hNode,
						const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
	CHANGE(kernel(nodeParams, before.op, &node), NULL,
	       inner_cuGraphExecKernelNodeSetParams_v2(hGraphExec, hNode, nodeParams));
}

CUresult make_cuGraphExecMemcpyNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
					     const CUDA_MEMCPY3D *copyParams, CUcontext ctx)
{
	CHANGE(copy(copyParams, ctx, before.op, &node), NULL,
	       inner_cuGraphExecMemcpyNodeSetParams(hGraphExec, hNode, copyParams, ctx));
}

CUresult make_cuGraphExecMemsetNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
					     const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx)
{
	CHANGE(set(memsetParams, ctx, before.op, &node), NULL,
	       inner_cuGraphExecMemsetNodeSetParams(hGraphExec, hNode, memsetParams, ctx));
}

CUresult make_cuGraphExecChildGraphNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph)
{
	CUgraph native = NULL;
	CHANGE(child(childGraph, &native, &node), native,
	       inner_cuGraphExecChildGraphNodeSetParams(hGraphExec, hNode, childGraph));
}

CUresult make_cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams *nodeParams)
{
	CUgraph native = NULL;
	CHANGE(nodeParams ? any(nodeParams, before.op, &node, &native) : CUDA_ERROR_INVALID_VALUE, native,
	       inner_cuGraphExecNodeSetParams(hGraphExec, hNode, nodeParams));
}

CUresult make_cuGraphExecHostNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
					   const CUDA_HOST_NODE_PARAMS *nodeParams)
{
	if (!nodeParams || !nodeParams->fn)
		return mpsd_answered(inner_cuGraphExecHostNodeSetParams(hGraphExec, hNode, nodeParams));
	CHANGE(host(nodeParams, before.op, &node), NULL,
	       inner_cuGraphExecHostNodeSetParams(hGraphExec, hNode, nodeParams));
}

CUresult make_cuGraphExecBatchMemOpNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
						 const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)
{
	CHANGE(memory(nodeParams, before.op, &node), NULL,
	       inner_cuGraphExecBatchMemOpNodeSetParams(hGraphExec, hNode, nodeParams));
}

CUresult make_cuGraphExecEventRecordNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent of)
{
	if (!of)
		return mpsd_answered(inner_cuGraphExecEventRecordNodeSetEvent(hGraphExec, hNode, of));
	CHANGE(event(of, MPSD_OP_RECORD, before.op, &node), NULL,
	       inner_cuGraphExecEventRecordNodeSetEvent(hGraphExec, hNode, of));
}

CUresult make_cuGraphExecEventWaitNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent of)
{
	if (!of)
		return mpsd_answered(inner_cuGraphExecEventWaitNodeSetEvent(hGraphExec, hNode, of));
	CHANGE(event(of, MPSD_OP_WAIT, before.op, &node), NULL,
	       inner_cuGraphExecEventWaitNodeSetEvent(hGraphExec, hNode, of));
}
