// SPDX-License-Identifier: MIT
/*
 * Conditional nodes: graphs that run, or do not, as often as a value says that kernels set. A handle is where its value is, in
 * memory of the host. What the calls refuse is as documented, and not measured.
 */
#include <stdlib.h>
#include <string.h>

#include "standin.h"

/* What has been launched may still run when its graph has gone: all of that is there as long as this library is. */
static void **kept;
static size_t kept_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *keep(size_t size)
{
	void *made = calloc(1, size);
	void **larger;

	pthread_mutex_lock(&lock);
	larger = made ? realloc(kept, (kept_count + 1) * sizeof(*kept)) : NULL;
	if (larger) {
		kept = larger;
		kept[kept_count++] = made;
	}
	pthread_mutex_unlock(&lock);
	if (larger)
		return made;
	free(made);
	return NULL;
}

static __attribute__((destructor)) void free_kept(void)
{
	for (size_t i = 0; i < kept_count; i++)
		free(kept[i]);
	free(kept);
}

API CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle *pHandle_out, CUgraph hGraph, CUcontext ctx,
					    unsigned int defaultLaunchValue, unsigned int flags)
{
	struct condition *made;

	if (!pHandle_out || !is_graph(hGraph) || !ctx || flags > CU_GRAPH_COND_ASSIGN_DEFAULT)
		return CUDA_ERROR_INVALID_VALUE;
	made = keep(sizeof(*made));
	if (!made)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*made = (struct condition){ .next = hGraph->conditions, .initial = defaultLaunchValue,
				    .assigns = flags == CU_GRAPH_COND_ASSIGN_DEFAULT };
	hGraph->conditions = made;
	*pHandle_out = (CUgraphConditionalHandle)(uintptr_t)made;
	return gate_node(CUDA_SUCCESS);
}

static bool is_condition(const struct CUgraph_st *graph, CUgraphConditionalHandle handle)
{
	const struct condition *condition = graph->conditions;

	while (condition && (uintptr_t)condition != handle)
		condition = condition->next;
	return condition != NULL;
}

static bool is_size(const CUDA_CONDITIONAL_NODE_PARAMS *given)
{
	switch (given->type) {
	case CU_GRAPH_COND_TYPE_IF:
		return given->size == 1 || given->size == 2;
	case CU_GRAPH_COND_TYPE_WHILE:
		return given->size == 1;
	default:
		return given->type == CU_GRAPH_COND_TYPE_SWITCH && given->size;
	}
}

static bool make_bodies(CUgraphNode node, unsigned int size)
{
	node->bodies = calloc(size, sizeof(*node->bodies));
	for (unsigned int i = 0; node->bodies && i < size; i++) {
		node->bodies[i] = new_child();
		if (!node->bodies[i])
			return false;
		node->bodies_count++;
	}
	return node->bodies != NULL;
}

CUresult add_conditional(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
			 CUDA_CONDITIONAL_NODE_PARAMS *given)
{
	struct operation operation = { .type = CU_GRAPH_NODE_TYPE_CONDITIONAL };
	CUresult result;

	if (!is_graph(graph) || !is_condition(graph, given->handle) || !is_size(given) || !given->ctx)
		return CUDA_ERROR_INVALID_VALUE;
	operation.conditional.condition = (struct condition *)(uintptr_t)given->handle;
	operation.conditional.type = given->type;
	operation.conditional.count = given->size;
	result = new_node(out, graph, after, count, CU_GRAPH_NODE_TYPE_CONDITIONAL, &operation);
	if (result == CUDA_SUCCESS && !make_bodies(*out, given->size))
		result = CUDA_ERROR_OUT_OF_MEMORY;
	if (result == CUDA_SUCCESS)
		given->phGraph_out = (*out)->bodies;
	return gate_node(result);
}

/* Run, without the lock, by the thread of the stream in which the graph was launched */

static void run_body(const struct body *body)
{
	for (size_t i = 0; i < body->count; i++) {
		struct operation one = body->each[i];

		if (one.run)
			one.run(&one);
	}
}

static bool is_lost(void)
{
	bool is;

	pthread_mutex_lock(&gpu_lock);
	is = working_for->broken;
	pthread_mutex_unlock(&gpu_lock);
	return is;
}

static void run(struct operation *operation)
{
	const struct condition *condition = operation->conditional.condition;
	struct body *const *bodies = operation->conditional.bodies;
	uint32_t value = __atomic_load_n(&condition->value, __ATOMIC_ACQUIRE);

	if (operation->conditional.type == CU_GRAPH_COND_TYPE_IF)
		value = value ? 0 : 1;
	if (operation->conditional.type != CU_GRAPH_COND_TYPE_WHILE && value < operation->conditional.count)
		run_body(bodies[value]);
	while (operation->conditional.type == CU_GRAPH_COND_TYPE_WHILE && !is_lost() &&
	       __atomic_load_n(&condition->value, __ATOMIC_ACQUIRE))
		run_body(bodies[0]);
}

struct body *new_body(size_t count)
{
	struct body *body = keep(sizeof(*body) + count * sizeof(*body->each));

	if (body)
		body->count = count;
	return body;
}

bool prepare_conditional(struct operation *operation)
{
	operation->run = run;
	operation->conditional.bodies = keep(operation->conditional.count * sizeof(struct body *));
	return operation->conditional.bodies != NULL;
}

static void assign(struct operation *operation)
{
	__atomic_store_n(&operation->conditional.condition->value, operation->conditional.condition->initial,
			 __ATOMIC_RELEASE);
}

struct operation assignment(struct condition *condition)
{
	return (struct operation){ .run = assign, .type = CU_GRAPH_NODE_TYPE_CONDITIONAL,
				   .conditional = { .condition = condition } };
}
