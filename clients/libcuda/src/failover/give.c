// SPDX-License-Identifier: MIT
/* What a node of a graph is, given to the driver by the names of the copy of this call. */
#include "exact/state.h"
#include "failover/nodes.h"

static CUresult give_kernel(const struct mpsd_node *node, struct mpsd_node_place *place)
{
	const struct mpsd_op *op = node->op;
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

CUresult mpsd_node_give(const struct mpsd_node *node, struct mpsd_node_place *place)
{
	if (node->child)
		return give_child(node, place, place->child);
	if (!node->op)
		return inner_cuGraphAddEmptyNode(&place->node, place->graph, place->after, node->count);
	switch (node->op->kind) {
	case MPSD_OP_LAUNCH:
		return give_kernel(node, place);
	case MPSD_OP_COPY:
		return give_copy(node, place);
	default:
		return give_set(node, place);
	}
}
