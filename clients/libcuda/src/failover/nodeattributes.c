// SPDX-License-Identifier: MIT
/* Attributes of kernel nodes: kept with the launch that the node is, and set again where the node is made again. */
#include <string.h>

#include "exact/params.h"
#include "exact/state.h"
#include "failover/line.h"
#include "failover/nodes.h"

#define NOT_FOLLOWED "an attribute of a kernel node that is not tracked"

CUresult make_cuGraphKernelNodeGetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, CUkernelNodeAttrValue *value_out)
{
	CUgraphNode native;
	CUgraph graph;
	CUresult result = mpsd_node_native(hNode, &native, &graph);

	return result == CUDA_SUCCESS ? mpsd_answered(inner_cuGraphKernelNodeGetAttribute(native, attr, value_out)) : result;
}

/* Handles in them would be those of another copy. */
static bool is_followed(CUkernelNodeAttrID attr)
{
	return attr != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT && attr != CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT &&
	       attr != CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE;
}

/* What the node is, shared; NULL: no launch that is known. */
static struct mpsd_op *launch_of(CUgraphNode name, CUcontext *context)
{
	struct mpsd_graph *graph = mpsd_made_graph(mpsd_node_graph(name));
	unsigned int number = graph ? mpsd_graph_number(graph, name) : 0;
	struct mpsd_op *op = graph && number < graph->count ? graph->nodes[number].op : NULL;

	if (op && op->kind != MPSD_OP_LAUNCH)
		op = NULL;
	if (op) {
		mpsd_op_share(op);
		*context = graph->nodes[number].context;
	}
	mpsd_graph_let_go(graph);
	return op;
}

/* The driver has it. */
static CUresult note(CUgraphNode name, CUkernelNodeAttrID attr, const CUkernelNodeAttrValue *value)
{
	struct mpsd_node node = { .op = NULL };
	struct mpsd_op *before = is_followed(attr) ? launch_of(name, &node.context) : NULL;
	CUresult result = CUDA_SUCCESS;

	if (before) {
		node.op = mpsd_params_with(before, attr, value);
		mpsd_op_free(before);
	}
	if (!node.op)
		return mpsd_line_made(result, NOT_FOLLOWED);
	result = mpsd_node_note(mpsd_node_graph(name), mpsd_node_number(name, 0), &node);
	mpsd_node_let_go(&node);
	return result;
}

CUresult make_cuGraphKernelNodeSetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, const CUkernelNodeAttrValue *value)
{
	CUgraphNode native;
	CUgraph graph;
	CUresult result = mpsd_node_native(hNode, &native, &graph);

	if (result == CUDA_SUCCESS && !is_followed(attr) && mpsd_tables()->moves)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (result == CUDA_SUCCESS)
		result = inner_cuGraphKernelNodeSetAttribute(native, attr, value);
	if (result != CUDA_SUCCESS)
		return mpsd_is_left() ? MPSD_AGAIN : result;
	return note(hNode, attr, value);
}

#define ATTRIBUTES 32		/* more than cuda.h has; what is none of a node's the driver refuses to tell */

struct values {
	bool is[ATTRIBUTES];
	CUkernelNodeAttrValue value[ATTRIBUTES];
};

static void look(CUgraphNode native, struct values *found)
{
	memset(found, 0, sizeof(*found));
	for (int i = 1; i < ATTRIBUTES; i++)
		found->is[i] = real_cuGraphKernelNodeGetAttribute(native, (CUkernelNodeAttrID)i, &found->value[i]) ==
			       CUDA_SUCCESS;
}

/* Which of them it copies is the driver's to know: those that are others than before. */
CUresult make_cuGraphKernelNodeCopyAttributes(CUgraphNode dst, CUgraphNode src)
{
	struct values before, after;
	CUgraphNode to, from;
	CUgraph graph, other;
	CUresult result = mpsd_node_native(dst, &to, &graph);

	if (result == CUDA_SUCCESS)
		result = mpsd_node_native(src, &from, &other);
	if (result == CUDA_SUCCESS) {
		look(to, &before);
		result = inner_cuGraphKernelNodeCopyAttributes(to, from);
	}
	if (result != CUDA_SUCCESS)
		return mpsd_is_left() ? MPSD_AGAIN : result;
	look(to, &after);
	for (int i = 1; i < ATTRIBUTES && result == CUDA_SUCCESS; i++)
		if (after.is[i] && memcmp(&before.value[i], &after.value[i], sizeof(after.value[i])))
			result = note(dst, (CUkernelNodeAttrID)i, &after.value[i]);
	return result;
}
