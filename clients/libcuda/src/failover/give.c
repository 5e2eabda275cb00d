// SPDX-License-Identifier: MIT
/* What a node of a graph is, given to the driver by the names of the copy of this call. */
#include <stdlib.h>
#include <string.h>

#include "exact/params.h"
#include "exact/state.h"
#include "failover/cast.h"
#include "failover/embedded.h"
#include "failover/nodes.h"

static CUresult give_launch(const struct mpsd_node *node, const struct mpsd_op *op, struct mpsd_node_place *place)
{
	const CUlaunchConfig *c = &op->launch.config;
	size_t bytes = op->launch.bytes;
	void *extra[] = { CU_LAUNCH_PARAM_BUFFER_POINTER, op->launch.buffer, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
			  CU_LAUNCH_PARAM_END };
	CUDA_KERNEL_NODE_PARAMS given = {
		.gridDimX = c->gridDimX, .gridDimY = c->gridDimY, .gridDimZ = c->gridDimZ,
		.blockDimX = c->blockDimX, .blockDimY = c->blockDimY, .blockDimZ = c->blockDimZ,
		.sharedMemBytes = c->sharedMemBytes,
		.kernelParams = op->launch.is_buffer ? NULL : op->launch.parameters,
		.extra = op->launch.is_buffer ? extra : NULL,
		.ctx = mpsd_native(node->context),
	};

	if (mpsd_made_is(op->launch.function, MPSD_MADE_KERNEL))
		given.kern = mpsd_native((CUkernel)op->launch.function);
	else
		given.func = mpsd_native(op->launch.function);
	if (place->exec)
		return inner_cuGraphExecKernelNodeSetParams_v2(place->exec, place->node, &given);
	if (place->node)
		return inner_cuGraphKernelNodeSetParams_v2(place->node, &given);
	return inner_cuGraphAddKernelNode_v2(&place->node, place->graph, place->after, node->count, &given);
}

static CUresult give_kernel(const struct mpsd_node *node, struct mpsd_node_place *place)
{
	struct mpsd_op *op;
	CUresult result;

	if (!mpsd_embedded_are_other())
		return give_launch(node, node->op, place);
	op = mpsd_embedded_launch(node->op, place->conditions);
	if (!op)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = give_launch(node, op, place);
	mpsd_op_free(op);
	return result;
}

static CUresult give_copy(const struct mpsd_node *node, struct mpsd_node_place *place)
{
	CUDA_MEMCPY3D given = mpsd_rows_native(node->op);
	CUcontext context = mpsd_native(node->context);

	if (place->exec)
		return inner_cuGraphExecMemcpyNodeSetParams(place->exec, place->node, &given, context);
	if (place->node)
		return inner_cuGraphMemcpyNodeSetParams(place->node, &given);
	return inner_cuGraphAddMemcpyNode(&place->node, place->graph, place->after, node->count, &given, context);
}

static CUresult give_set(const struct mpsd_node *node, struct mpsd_node_place *place)
{
	const struct mpsd_op *op = node->op;
	CUDA_MEMSET_NODE_PARAMS given = {
		.dst = mpsd_address(op->set.to), .pitch = op->set.pitch, .value = op->set.value,
		.elementSize = (unsigned int)op->set.width, .width = op->set.count,
		.height = op->set.has_rows ? op->set.rows : 1,
	};
	CUcontext context = mpsd_native(node->context);

	if (place->exec)
		return inner_cuGraphExecMemsetNodeSetParams(place->exec, place->node, &given, context);
	if (place->node)
		return inner_cuGraphMemsetNodeSetParams(place->node, &given);
	return inner_cuGraphAddMemsetNode(&place->node, place->graph, place->after, node->count, &given, context);
}

static CUresult give_child(const struct mpsd_node *node, struct mpsd_node_place *place, CUgraph child)
{
	if (place->exec)
		return inner_cuGraphExecChildGraphNodeSetParams(place->exec, place->node, child);
	return inner_cuGraphAddChildGraphNode(&place->node, place->graph, place->after, node->count, child);
}

static CUresult give_call(const struct mpsd_node *node, struct mpsd_node_place *place)
{
	CUDA_HOST_NODE_PARAMS given;

	if (!mpsd_hostnode_native(node->op, &given))
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (place->exec)
		return inner_cuGraphExecHostNodeSetParams(place->exec, place->node, &given);
	if (place->node)
		return inner_cuGraphHostNodeSetParams(place->node, &given);
	return inner_cuGraphAddHostNode(&place->node, place->graph, place->after, node->count, &given);
}

static CUresult give_memory(const struct mpsd_node *node, struct mpsd_node_place *place)
{
	CUDA_BATCH_MEM_OP_NODE_PARAMS given = mpsd_memops_native(node->op->memory, node->context);
	CUresult result;

	if (!given.paramArray)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (place->exec)
		result = inner_cuGraphExecBatchMemOpNodeSetParams(place->exec, place->node, &given);
	else if (place->node)
		result = inner_cuGraphBatchMemOpNodeSetParams(place->node, &given);
	else
		result = inner_cuGraphAddBatchMemOpNode(&place->node, place->graph, place->after, node->count, &given);
	free(given.paramArray);
	return result;
}

static CUresult give_record(const struct mpsd_node *node, struct mpsd_node_place *place, CUevent event)
{
	if (place->exec)
		return inner_cuGraphExecEventRecordNodeSetEvent(place->exec, place->node, event);
	if (place->node)
		return inner_cuGraphEventRecordNodeSetEvent(place->node, event);
	return inner_cuGraphAddEventRecordNode(&place->node, place->graph, place->after, node->count, event);
}

static CUresult give_wait(const struct mpsd_node *node, struct mpsd_node_place *place, CUevent event)
{
	if (place->exec)
		return inner_cuGraphExecEventWaitNodeSetEvent(place->exec, place->node, event);
	if (place->node)
		return inner_cuGraphEventWaitNodeSetEvent(place->node, event);
	return inner_cuGraphAddEventWaitNode(&place->node, place->graph, place->after, node->count, event);
}

/* A new node whose event has gone since does nothing. */
static CUresult give_event(const struct mpsd_node *node, struct mpsd_node_place *place)
{
	CUevent name = node->op->event.event;

	if (!place->exec && !place->node && mpsd_tables()->moves && mpsd_cast_is_gone(name))
		return inner_cuGraphAddEmptyNode(&place->node, place->graph, place->after, node->count);
	return (node->op->kind == MPSD_OP_RECORD ? give_record : give_wait)(node, place, mpsd_native(name));
}

/* A graph that the node has of its own: cuGraphAddNode() alone says so. */
static CUresult give_embedded(const struct mpsd_node *node, struct mpsd_node_place *place)
{
	const struct mpsd_embedded *embedded = node->embedded;
	CUgraphNodeParams given = { .type = CU_GRAPH_NODE_TYPE_GRAPH };
	CUresult result;

	if (place->exec || place->node)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (embedded->is_moved) {
		given.graph.graph = place->child;
		*mpsd_node_ownership(&given) = MPSD_NODE_OWNS;
	} else {
		given.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
		given.conditional.handle = mpsd_tables()->moves ? mpsd_embedded_word(embedded->handle, place->conditions)
								: embedded->handle;
		given.conditional.type = embedded->type;
		given.conditional.size = embedded->size;
		given.conditional.ctx = mpsd_native(node->context);
	}
	result = inner_cuGraphAddNode_v2(&place->node, place->graph, place->after, NULL, node->count, &given);
	if (result == CUDA_SUCCESS && !embedded->is_moved)
		place->bodies = given.conditional.phGraph_out;
	return result;
}

static CUresult give(const struct mpsd_node *node, struct mpsd_node_place *place)
{
	if (node->embedded)
		return give_embedded(node, place);
	if (node->child)
		return give_child(node, place, place->child);
	if (!node->op)
		return inner_cuGraphAddEmptyNode(&place->node, place->graph, place->after, node->count);
	switch (node->op->kind) {
	case MPSD_OP_LAUNCH:
		return give_kernel(node, place);
	case MPSD_OP_COPY:
		return give_copy(node, place);
	case MPSD_OP_CALL:
		return give_call(node, place);
	case MPSD_OP_MEMORY:
		return give_memory(node, place);
	case MPSD_OP_RECORD:
	case MPSD_OP_WAIT:
		return give_event(node, place);
	default:
		return give_set(node, place);
	}
}

/* The calls by which nodes are added take no data of edges. */
static CUresult give_edges(const struct mpsd_node *node, const struct mpsd_node_place *place)
{
	CUgraphNode *to = malloc((node->count + 1) * sizeof(*to));
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;

	for (unsigned int i = 0; to && i < node->count; i++)
		to[i] = place->node;
	if (to)
		result = mpsd_edges_add(place->graph, place->after, to, node->edges, node->count);
	free(to);
	return result;
}

static CUresult give_attributes(const struct mpsd_op *op, CUgraphNode node)
{
	CUkernelNodeAttrValue cooperative = { .cooperative = 1 };
	CUresult result = CUDA_SUCCESS;

	if (op->launch.is_cooperative)
		result = inner_cuGraphKernelNodeSetAttribute(node, CU_LAUNCH_ATTRIBUTE_COOPERATIVE, &cooperative);
	for (unsigned int i = 0; i < op->launch.config.numAttrs && result == CUDA_SUCCESS; i++) {
		const CUlaunchAttribute *one = &op->launch.attributes[i];

		/* In a graph that is an edge. */
		if (one->id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION && one->id != CU_LAUNCH_ATTRIBUTE_IGNORE)
			result = inner_cuGraphKernelNodeSetAttribute(node, one->id, &one->value);
	}
	return result;
}

static CUresult add(const struct mpsd_node *node, struct mpsd_node_place *place)
{
	struct mpsd_node alone = *node;
	CUresult result;

	if (node->edges)
		alone.count = 0;
	result = give(&alone, place);
	if (result != CUDA_SUCCESS)
		return result;
	if (node->op && node->op->kind == MPSD_OP_LAUNCH)
		result = give_attributes(node->op, place->node);
	if (result == CUDA_SUCCESS && node->edges)
		result = give_edges(node, place);
	if (result != CUDA_SUCCESS)
		inner_cuGraphDestroyNode(place->node);
	return result;
}

CUresult mpsd_node_give(const struct mpsd_node *node, struct mpsd_node_place *place)
{
	return place->exec || place->node ? give(node, place) : add(node, place);
}
