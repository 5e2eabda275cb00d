// SPDX-License-Identifier: MIT
/* The program's calls that say what a node of a graph is. What cannot be followed the driver is told as it is. */
#include <stdlib.h>

#include "exact/params.h"
#include "exact/state.h"
#include "failover/line.h"
#include "failover/nodes.h"

#define NOT_FOLLOWED "a graph node of an untracked type"

/* After the driver was told: the program is not carried over, unless nothing came of it. */
static CUresult passed(CUresult result)
{
	result = mpsd_line_made(result, NOT_FOLLOWED);
	return mpsd_is_left() ? MPSD_AGAIN : result;
}

/* What is missing is missing in any copy. */
static CUresult refused(CUresult result)
{
	if (result == CUDA_ERROR_INVALID_VALUE)
		return result;
	mpsd_line_opaque(NOT_FOLLOWED);
	return CUDA_ERROR_NOT_SUPPORTED;
}

/* In another copy than the first one its handles would lead astray. */
#define PASS(result, call)									\
	(mpsd_is_loss(result) || (result) == MPSD_AGAIN ? (result)				\
	 : mpsd_tables()->moves			      ? refused(result)			\
						      : passed(call))

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

	if (graph && number < graph->count) {
		before.op = graph->nodes[number].op;
		before.context = graph->nodes[number].context;
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

	*node = (struct mpsd_node){ .child = result == CUDA_SUCCESS ? mpsd_made_graph(given) : NULL };
	return result != CUDA_SUCCESS || node->child ? result : CUDA_ERROR_NOT_SUPPORTED;
}

/* CUDA_CHILD_GRAPH_NODE_PARAMS.ownership, behind the graph; cuda.h before 12.9 lacks it. 0: the graph is cloned. */
static bool is_owner_given(const CUgraphNodeParams *given)
{
	_Static_assert(sizeof(given->reserved1[0]) == sizeof(CUgraph), "so that ownership begins the second word");
	return (uint32_t)given->reserved1[1] != 0;
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
		return is_owner_given(given) ? CUDA_ERROR_NOT_SUPPORTED : child(given->graph.graph, native, node);
	case CU_GRAPH_NODE_TYPE_EMPTY:
		*node = (struct mpsd_node){ .op = NULL };
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}

/* Added */

#define ADD(result, native, call)											\
	((result) == CUDA_SUCCESS										\
		 ? mpsd_node_add(&(struct mpsd_addition){ phGraphNode, hGraph, dependencies, numDependencies }, node,	\
				 native)										\
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
	const struct mpsd_addition addition = { phGraphNode, hGraph, dependencies, numDependencies };

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

CUresult make_cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				const CUgraphEdgeData *dependencyData, size_t numDependencies,
				CUgraphNodeParams *nodeParams)
{
	struct mpsd_node node;
	CUgraph native = NULL;
	CUresult result = CUDA_ERROR_NOT_SUPPORTED;

	if (nodeParams && mpsd_edges_are_plain(dependencyData, numDependencies))
		result = any(nodeParams, NULL, &node, &native);
	return ADD(result, native,
		   inner_cuGraphAddNode_v2(phGraphNode, hGraph, dependencies, dependencyData, numDependencies,
					   nodeParams));
}

CUresult make_cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
			     size_t numDependencies, CUgraphNodeParams *nodeParams)
{
	struct mpsd_node node;
	CUgraph native = NULL;
	CUresult result = nodeParams ? any(nodeParams, NULL, &node, &native) : CUDA_ERROR_INVALID_VALUE;

	return ADD(result, native,
		   inner_cuGraphAddNode(phGraphNode, hGraph, dependencies, numDependencies, nodeParams));
}

/* Something else from now on: in the graph, which executable graphs that are there do not see */

#define BECOME(of, find, call)									\
	struct before before = look_before(of, hNode);						\
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
