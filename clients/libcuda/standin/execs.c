// SPDX-License-Identifier: MIT
/* Executable graphs: what a graph does, in an order that fits, and which node each part is of. */
#include <stdlib.h>
#include <string.h>

#include "standin.h"

struct part {
	CUgraphNode node;	/* of the graph that was instantiated; of a copy of a graph in it all parts are one node's */
	struct operation operation;
	CUgraphExec *bodies;	/* of a conditional one */
};

struct CUgraphExec_st {
	CUgraphExec next;
	const void *sign;
	struct operation *first;	/* what comes before all parts: values of conditions */
	size_t first_count;
	struct part *parts;
	size_t count;
};

static const char own;

static bool is_exec(const struct CUgraphExec_st *exec)
{
	must_live(exec);
	return exec && exec->sign == &own;
}

static bool append(CUgraphExec exec, CUgraphNode node, const struct operation *operation)
{
	struct part *larger = realloc(exec->parts, (exec->count + 1) * sizeof(*larger));

	if (!larger)
		return false;
	exec->parts = larger;
	exec->parts[exec->count++] = (struct part){ node, *operation, NULL };
	return true;
}

static bool is_ready(const struct CUgraphNode_st *node, CUgraphNode const *done, size_t count)
{
	for (size_t i = 0; i < node->count; i++) {
		size_t k = 0;

		while (k < count && done[k] != node->after[i])
			k++;
		if (k == count)
			return false;
	}
	return true;
}

static bool has(CUgraphNode const *done, size_t count, CUgraphNode node)
{
	while (count && done[count - 1] != node)
		count--;
	return count != 0;
}

static CUresult flatten(CUgraphExec exec, const struct CUgraph_st *graph, CUgraphNode whole);

static CUresult flatten_bodies(CUgraphExec exec, CUgraphNode node)
{
	CUgraphExec *bodies = calloc(node->bodies_count, sizeof(*bodies));
	CUresult result = bodies && append(exec, node, &node->operation) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;

	if (result != CUDA_SUCCESS) {
		free(bodies);
		return result;
	}
	exec->parts[exec->count - 1].bodies = bodies;
	for (unsigned int i = 0; i < node->bodies_count && result == CUDA_SUCCESS; i++) {
		bodies[i] = calloc(1, sizeof(*bodies[i]));
		result = bodies[i] ? flatten(bodies[i], node->bodies[i], NULL) : CUDA_ERROR_OUT_OF_MEMORY;
	}
	return result;
}

/* What the nodes do, each after what it comes after. `whole`: the node that all of it is of; NULL: each its own. */
static CUresult flatten(CUgraphExec exec, const struct CUgraph_st *graph, CUgraphNode whole)
{
	CUgraphNode *done = calloc(graph->count + 1, sizeof(CUgraphNode));
	CUresult result = done ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	size_t count = 0, before = 1;

	while (result == CUDA_SUCCESS && count < graph->count && count != before) {
		before = count;
		for (size_t i = 0; i < graph->count && result == CUDA_SUCCESS; i++) {
			CUgraphNode node = graph->nodes[i];

			if (has(done, count, node) || !is_ready(node, done, count))
				continue;
			done[count++] = node;
			if (node->child)
				result = flatten(exec, node->child, whole ? whole : node->is_moved ? NULL : node);
			else if (node->bodies_count)
				result = flatten_bodies(exec, node);
			else if (node->type != CU_GRAPH_NODE_TYPE_EMPTY &&
				 !append(exec, whole ? whole : node, &node->operation))
				result = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	free(done);
	return result == CUDA_SUCCESS && count < graph->count ? CUDA_ERROR_INVALID_VALUE : result;
}

/* As graphs are (graph.c). */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUgraphExec execs;

static void free_parts(CUgraphExec exec)
{
	for (size_t i = 0; i < exec->count; i++) {
		struct part *part = &exec->parts[i];

		for (unsigned int k = 0; part->bodies && k < part->operation.conditional.count; k++) {
			if (part->bodies[k])
				free_parts(part->bodies[k]);
			free(part->bodies[k]);
		}
		free(part->bodies);
	}
	free(exec->parts);
}

static void free_exec(CUgraphExec exec)
{
	CUgraphExec *link = &execs;

	pthread_mutex_lock(&lock);
	while (*link != exec)
		link = &(*link)->next;
	*link = exec->next;
	pthread_mutex_unlock(&lock);
	free_parts(exec);
	free(exec->first);
	is_gone(exec);
	free(exec);
}

static __attribute__((destructor)) void free_execs(void)
{
	while (execs)
		free_exec(execs);
}

/* Those of graphs in it, too. False: no memory. */
static bool assign_all(CUgraphExec exec, const struct CUgraph_st *graph)
{
	bool is = true;

	for (struct condition *condition = graph->conditions; condition && is; condition = condition->next) {
		struct operation *larger;

		if (!condition->assigns)
			continue;
		larger = realloc(exec->first, (exec->first_count + 1) * sizeof(*larger));
		is = larger != NULL;
		if (is) {
			larger[exec->first_count++] = assignment(condition);
			exec->first = larger;
		}
	}
	for (size_t i = 0; i < graph->count && is; i++) {
		const struct CUgraphNode_st *node = graph->nodes[i];

		is = !node->child || assign_all(exec, node->child);
		for (unsigned int k = 0; k < node->bodies_count && is; k++)
			is = assign_all(exec, node->bodies[k]);
	}
	return is;
}

static CUresult instantiate(CUgraphExec *out, const struct CUgraph_st *graph)
{
	CUgraphExec exec = calloc(1, sizeof(*exec));
	CUresult result;

	if (!exec)
		return CUDA_ERROR_OUT_OF_MEMORY;
	is_new(exec);
	exec->sign = &own;
	pthread_mutex_lock(&lock);
	exec->next = execs;
	execs = exec;
	pthread_mutex_unlock(&lock);
	result = flatten(exec, graph, NULL);
	if (result == CUDA_SUCCESS && !assign_all(exec, graph))
		result = CUDA_ERROR_OUT_OF_MEMORY;
	if (result == CUDA_SUCCESS)
		*out = exec;
	else
		free_exec(exec);
	return result;
}

API CUresult cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags)
{
	if (!phGraphExec || !is_graph(hGraph) || flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD)
		return CUDA_ERROR_INVALID_VALUE;
	return gate_node(instantiate(phGraphExec, hGraph));
}

API CUresult cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph,
					  CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams)
{
	CUstream stream;
	CUresult result;

	if (!phGraphExec || !is_graph(hGraph) || !instantiateParams)
		return CUDA_ERROR_INVALID_VALUE;
	if (instantiateParams->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) {
		result = enter_stream(instantiateParams->hUploadStream, &stream);
		if (result != CUDA_SUCCESS)
			return result;
		leave(result);
	}
	result = instantiate(phGraphExec, hGraph);
	instantiateParams->hErrNode_out = NULL;
	instantiateParams->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS
							       : CUDA_GRAPH_INSTANTIATE_ERROR;
	return result;
}

/* As it is now: whoever changes it later does not change what was launched. False: no memory. */
static bool prepare_part(const struct part *part, struct operation *operation)
{
	*operation = part->operation;
	if (!part->bodies)
		return true;
	if (!prepare_conditional(operation))
		return false;
	for (unsigned int i = 0; i < operation->conditional.count; i++) {
		const struct CUgraphExec_st *from = part->bodies[i];
		struct body *body = new_body(from->count);

		for (size_t k = 0; body && k < from->count; k++)
			if (!prepare_part(&from->parts[k], &body->each[k]))
				return false;
		if (!body)
			return false;
		operation->conditional.bodies[i] = body;
	}
	return true;
}

static CUresult submit_part(CUstream stream, const struct part *part)
{
	struct operation prepared, *operation = &prepared;
	bool is = prepare_part(part, operation);
	bool is_event = operation->type == CU_GRAPH_NODE_TYPE_EVENT_RECORD ||
			operation->type == CU_GRAPH_NODE_TYPE_WAIT_EVENT;

	if (!is)
		return CUDA_ERROR_OUT_OF_MEMORY;
	return is_event ? submit_event(stream, operation) : submit(stream, operation);
}

API CUresult cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream)
{
	CUstream stream;
	CUresult result;

	if (!is_exec(hGraphExec))
		return CUDA_ERROR_INVALID_VALUE;
	result = enter_stream(hStream, &stream);
	if (result != CUDA_SUCCESS)
		return result;
	for (size_t i = 0; i < hGraphExec->first_count && result == CUDA_SUCCESS; i++)
		result = submit(stream, &hGraphExec->first[i]);
	for (size_t i = 0; i < hGraphExec->count && result == CUDA_SUCCESS; i++)
		result = submit_part(stream, &hGraphExec->parts[i]);
	return leave(result);
}

API CUresult cuGraphExecDestroy(CUgraphExec hGraphExec)
{
	if (!is_exec(hGraphExec))
		return CUDA_ERROR_INVALID_VALUE;
	free_exec(hGraphExec);
	return CUDA_SUCCESS;
}

/* As if its graph were that one; its nodes stay those of its own. */
API CUresult cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo)
{
	CUgraphExec like = NULL;
	bool is;

	if (!is_exec(hGraphExec) || !is_graph(hGraph) || !resultInfo)
		return CUDA_ERROR_INVALID_VALUE;
	if (instantiate(&like, hGraph) != CUDA_SUCCESS)
		return CUDA_ERROR_OUT_OF_MEMORY;
	is = like->count == hGraphExec->count;
	for (size_t i = 0; is && i < like->count; i++)
		is = like->parts[i].operation.type == hGraphExec->parts[i].operation.type;
	for (size_t i = 0; is && i < like->count; i++) {
		CUgraphExec *bodies = like->parts[i].bodies;

		like->parts[i].bodies = hGraphExec->parts[i].bodies;
		hGraphExec->parts[i].bodies = bodies;
		hGraphExec->parts[i].operation = like->parts[i].operation;
	}
	free_exec(like);
	*resultInfo = (CUgraphExecUpdateResultInfo){
		.result = is ? CU_GRAPH_EXEC_UPDATE_SUCCESS : CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED,
	};
	return gate_node(is ? CUDA_SUCCESS : CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
}

static struct part *find_part(CUgraphExec exec, const struct CUgraphNode_st *node)
{
	struct part *found = NULL;

	for (size_t i = 0; i < exec->count && !found; i++) {
		struct part *part = &exec->parts[i];

		if (part->node == node)
			return part;
		for (unsigned int k = 0; part->bodies && k < part->operation.conditional.count && !found; k++)
			found = find_part(part->bodies[k], node);
	}
	return found;
}

CUresult change_exec(CUgraphExec exec, CUgraphNode node, CUgraphNodeType type, CUresult prepared,
		     const struct operation *operation)
{
	struct part *part;

	if (prepared != CUDA_SUCCESS)
		return prepared;
	if (!is_exec(exec) || !is_node(node) || node->type != type)
		return CUDA_ERROR_INVALID_VALUE;
	part = find_part(exec, node);
	if (!part)
		return CUDA_ERROR_INVALID_VALUE;
	part->operation = *operation;
	return CUDA_SUCCESS;
}

API CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec hGraphExec, CUgraphNode hNode,
					       const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
	struct operation operation;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	return gate_node(leave(change_exec(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_KERNEL,
				      prepare_kernel(nodeParams, &operation), &operation)));
}

API CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMCPY3D *copyParams,
					    CUcontext ctx)
{
	struct operation operation;
	CUcontext context;
	bool wait = false;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	result = ctx == context ? prepare_box(copyParams, &operation, &wait) : CUDA_ERROR_INVALID_VALUE;
	return leave(change_exec(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_MEMCPY, result, &operation));
}

API CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
					    const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx)
{
	struct operation operation;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	result = ctx == context
			 ? prepare_rows(memsetParams->dst, memsetParams->height > 1 ? memsetParams->pitch : 0,
					memsetParams->value, memsetParams->elementSize, memsetParams->width,
					memsetParams->height, &operation)
			 : CUDA_ERROR_INVALID_VALUE;
	return leave(change_exec(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_MEMSET, result, &operation));
}

API CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph)
{
	struct CUgraphExec_st like = { .sign = &own };
	size_t first = 0, i = 0;
	CUresult result;

	if (!is_exec(hGraphExec) || !is_node(hNode) || hNode->type != CU_GRAPH_NODE_TYPE_GRAPH || !is_graph(childGraph))
		return CUDA_ERROR_INVALID_VALUE;
	result = flatten(&like, childGraph, hNode);
	while (first < hGraphExec->count && hGraphExec->parts[first].node != hNode)
		first++;
	while (first + i < hGraphExec->count && hGraphExec->parts[first + i].node == hNode)
		i++;
	if (result == CUDA_SUCCESS && i != like.count)
		result = CUDA_ERROR_INVALID_VALUE;
	for (i = 0; result == CUDA_SUCCESS && i < like.count; i++)
		hGraphExec->parts[first + i] = like.parts[i];
	free(like.parts);
	return result;
}

API CUresult cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams *nodeParams)
{
	CUDA_KERNEL_NODE_PARAMS kernel;
	CUDA_MEMSET_NODE_PARAMS set;
	CUDA_HOST_NODE_PARAMS host;
	CUDA_BATCH_MEM_OP_NODE_PARAMS memory;
	CUcontext context = NULL;

	if (!nodeParams)
		return CUDA_ERROR_INVALID_VALUE;
	cuCtxGetCurrent(&context);
	switch (nodeParams->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		memcpy(&kernel, &nodeParams->kernel, sizeof(kernel));
		return cuGraphExecKernelNodeSetParams_v2(hGraphExec, hNode, &kernel);
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		return cuGraphExecMemcpyNodeSetParams(hGraphExec, hNode, &nodeParams->memcpy.copyParams, context);
	case CU_GRAPH_NODE_TYPE_MEMSET:
		memcpy(&set, &nodeParams->memset, sizeof(set));
		return cuGraphExecMemsetNodeSetParams(hGraphExec, hNode, &set, context);
	case CU_GRAPH_NODE_TYPE_GRAPH:
		return cuGraphExecChildGraphNodeSetParams(hGraphExec, hNode, nodeParams->graph.graph);
	case CU_GRAPH_NODE_TYPE_HOST:
		memcpy(&host, &nodeParams->host, sizeof(host));
		return cuGraphExecHostNodeSetParams(hGraphExec, hNode, &host);
	case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
		return cuGraphExecEventRecordNodeSetEvent(hGraphExec, hNode, nodeParams->eventRecord.event);
	case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
		return cuGraphExecEventWaitNodeSetEvent(hGraphExec, hNode, nodeParams->eventWait.event);
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
		memcpy(&memory, &nodeParams->memOp, sizeof(memory));
		return cuGraphExecBatchMemOpNodeSetParams(hGraphExec, hNode, &memory);
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}
