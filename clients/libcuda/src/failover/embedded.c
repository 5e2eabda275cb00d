// SPDX-License-Identifier: MIT
#include "failover/embedded.h"

#include <stdlib.h>
#include <string.h>

#include "exact/params.h"
#include "exact/state.h"
#include "failover/line.h"

#define FIRST_ROOM 8
#define WORD sizeof(uint64_t)
#define LARGEST_NUMBER 0xffffffffull	/* a handle that is less may be a number among a kernel's parameters */

atomic_uint mpsd_embedded_conditions;

struct mpsd_embedded *mpsd_embedded_new(unsigned int size)
{
	struct mpsd_embedded *embedded = calloc(1, sizeof(*embedded) + size * sizeof(*embedded->names));

	if (!embedded)
		return NULL;
	embedded->references = 1;
	embedded->size = size;
	return embedded;
}

struct mpsd_embedded *mpsd_embedded_hold(struct mpsd_embedded *embedded)
{
	atomic_fetch_add(&embedded->references, 1);
	return embedded;
}

void mpsd_embedded_let_go(struct mpsd_embedded *embedded)
{
	if (embedded && atomic_fetch_sub(&embedded->references, 1) == 1)
		free(embedded);
}

/* Pairs */

bool mpsd_pairs_add(struct mpsd_pairs *pairs, uint64_t name, uint64_t native)
{
	unsigned int room = pairs->room ? 2 * pairs->room : FIRST_ROOM;
	struct mpsd_pair *larger;

	if (pairs->count == pairs->room) {
		larger = realloc(pairs->each, room * sizeof(*larger));
		if (!larger)
			return false;
		pairs->each = larger;
		pairs->room = room;
	}
	pairs->each[pairs->count++] = (struct mpsd_pair){ name, native };
	return true;
}

bool mpsd_pairs_find(const struct mpsd_pairs *pairs, uint64_t name, uint64_t *native)
{
	for (unsigned int i = 0; i < pairs->count; i++) {
		if (pairs->each[i].name != name)
			continue;
		*native = pairs->each[i].native;
		return true;
	}
	return false;
}

bool mpsd_pairs_copy(const struct mpsd_pairs *pairs, struct mpsd_pairs *to)
{
	bool is = true;

	*to = (struct mpsd_pairs){ 0, 0, NULL };
	for (unsigned int i = 0; i < pairs->count && is; i++)
		is = mpsd_pairs_add(to, pairs->each[i].name, pairs->each[i].native);
	return is;
}

/* Snapshots. All under the lock of made.h. */

static struct mpsd_graph *snapshot(const struct mpsd_made *made);

static bool fill(struct mpsd_graph *graph, struct mpsd_node *node)
{
	struct mpsd_embedded *embedded = node->embedded;

	node->bodies = calloc(embedded->size, sizeof(*node->bodies));
	for (unsigned int i = 0; node->bodies && i < embedded->size; i++) {
		node->bodies[i] = snapshot(mpsd_made_find(embedded->names[i]));
		if (!node->bodies[i])
			return false;
		mpsd_graph_has(graph, node->bodies[i]);
	}
	return node->bodies != NULL;
}

/* NULL: it is not known, or there is no memory. */
static struct mpsd_graph *snapshot(const struct mpsd_made *made)
{
	struct mpsd_graph *graph = made ? made->graph : NULL;
	bool is = true;

	if (!graph || !graph->has_embedded)
		return graph ? mpsd_graph_hold(graph) : NULL;
	graph = mpsd_graph_copy(graph);
	for (unsigned int i = 0; graph && i < graph->count && is; i++)
		is = !graph->nodes[i].embedded || graph->nodes[i].bodies || fill(graph, &graph->nodes[i]);
	if (is)
		return graph;
	mpsd_graph_let_go(graph);
	return NULL;
}

struct mpsd_graph *mpsd_embedded_snapshot(CUgraph name)
{
	struct mpsd_graph *graph;

	mpsd_made_lock();
	graph = snapshot(mpsd_made_find(name));
	mpsd_made_unlock();
	return graph;
}

const struct mpsd_node *mpsd_embedded_find(const struct mpsd_graph *graph, CUgraphNode name)
{
	const struct mpsd_node *found = NULL;

	for (unsigned int i = 0; i < graph->count && !found; i++) {
		const struct mpsd_node *node = &graph->nodes[i];

		if (node->name == name)
			return node;
		for (unsigned int k = 0; node->bodies && k < node->embedded->size && !found; k++)
			found = mpsd_embedded_find(node->bodies[k], name);
	}
	return found;
}

bool mpsd_embedded_become(struct mpsd_graph *graph, CUgraphNode name, const struct mpsd_node *what)
{
	for (unsigned int i = 0; i < graph->count; i++) {
		struct mpsd_node *node = &graph->nodes[i];

		if (node->name == name)
			return mpsd_graph_become(graph, i, what), true;
		for (unsigned int k = 0; node->bodies && k < node->embedded->size; k++) {
			struct mpsd_graph *mine;

			if (!mpsd_embedded_find(node->bodies[k], name))
				continue;
			mine = mpsd_graph_copy(node->bodies[k]);
			if (!mine)
				return false;
			mpsd_graph_let_go(node->bodies[k]);
			node->bodies[k] = mine;
			return mpsd_embedded_become(mine, name, what);
		}
	}
	return false;
}

/* Handles */

CUresult make_cuGraphConditionalHandleCreate(CUgraphConditionalHandle *pHandle_out, CUgraph hGraph, CUcontext ctx,
					     unsigned int defaultLaunchValue, unsigned int flags)
{
	uint64_t moves = mpsd_tables()->moves;
	struct mpsd_made record = { .kind = MPSD_MADE_CONDITION, .of = mpsd_made_known(hGraph) };
	struct mpsd_condition condition = { 0, ctx, defaultLaunchValue, flags };
	struct mpsd_graph *graph;
	CUgraph native;
	CUresult result = mpsd_graph_native(hGraph, &native);

	if (result == CUDA_SUCCESS)
		result = inner_cuGraphConditionalHandleCreate(pHandle_out, native, mpsd_native(ctx), defaultLaunchValue, flags);
	if (result != CUDA_SUCCESS)
		return mpsd_is_left() ? MPSD_AGAIN : result;
	if (*pHandle_out <= LARGEST_NUMBER)
		return mpsd_line_made(result, "a handle of a conditional node that looks like a number");
	mpsd_captured_built(hGraph);
	record.native = (void *)(uintptr_t)*pHandle_out;
	if (!mpsd_made_add(&record, moves))
		return MPSD_AGAIN;
	condition.name = *pHandle_out = (uintptr_t)record.name;
	atomic_fetch_add(&mpsd_embedded_conditions, 1);
	mpsd_made_lock();
	graph = mpsd_built_own(hGraph);
	if (graph && !mpsd_graph_add_condition(graph, &condition))
		graph = NULL;
	mpsd_made_unlock();
	return graph ? result : mpsd_line_made(result, "a handle of a conditional node of an untracked graph");
}

uint64_t mpsd_embedded_word(uint64_t word, const struct mpsd_pairs *conditions)
{
	const struct mpsd_made *made;
	uint64_t native;
	bool is;

	if (word <= LARGEST_NUMBER)
		return word;
	if (conditions)
		return mpsd_pairs_find(conditions, word, &native) ? native : word;
	made = mpsd_made_look((void *)(uintptr_t)word);
	is = made && made->kind == MPSD_MADE_CONDITION;
	mpsd_made_looked();
	return is ? (uintptr_t)mpsd_native((void *)(uintptr_t)word) : word;
}

struct search {
	uint64_t word;
	bool has;
};

static CUresult look_for(const struct mpsd_op *op, void *with)
{
	struct search *search = with;
	uint64_t word;

	for (size_t at = 0; op->kind == MPSD_OP_LAUNCH && at + WORD <= op->launch.bytes; at += WORD) {
		memcpy(&word, op->launch.buffer + at, WORD);
		search->has = search->has || word == search->word;
	}
	return CUDA_SUCCESS;
}

bool mpsd_embedded_are_told(const struct mpsd_graph *graph)
{
	bool are = true;

	for (unsigned int i = 0; i < graph->conditions_count && are; i++) {
		struct search search = { graph->conditions[i].name, false };

		mpsd_graph_each(graph, look_for, &search);
		are = search.has;
	}
	for (unsigned int i = 0; i < graph->count && are; i++) {
		const struct mpsd_node *node = &graph->nodes[i];

		for (unsigned int k = 0; node->bodies && k < node->embedded->size && are; k++)
			are = mpsd_embedded_are_told(node->bodies[k]);
	}
	return are;
}

/* Records of such graphs */

static bool note_body(const struct mpsd_made *of, CUgraph native, CUgraph *name, uint64_t moves)
{
	struct mpsd_made record = { .kind = MPSD_MADE_GRAPH, .native = native, .of = (struct mpsd_made *)of,
				    .device = mpsd_current_device(), .graph = mpsd_graph_new(NULL, true) };

	if (!record.graph || !mpsd_made_add(&record, moves)) {
		mpsd_graph_let_go(record.graph);
		return false;
	}
	*name = record.name;
	return true;
}

bool mpsd_embedded_note(CUgraphNode name, struct mpsd_embedded *embedded, const CUgraph *natives, uint64_t moves)
{
	struct mpsd_made *of = mpsd_made_known(name);
	bool is = of != NULL;

	if (embedded->is_moved)
		return is && mpsd_made_move_into(embedded->names[0], of);
	for (unsigned int i = 0; i < embedded->size && is; i++)
		is = note_body(of, natives[i], &embedded->names[i], moves);
	return is;
}

struct mpsd_op *mpsd_embedded_launch(const struct mpsd_op *op, const struct mpsd_pairs *conditions)
{
	struct mpsd_op *made = mpsd_params_copy(op);

	for (size_t at = 0; made && at + sizeof(uint64_t) <= made->launch.bytes; at += sizeof(uint64_t)) {
		uint64_t word;

		memcpy(&word, made->launch.buffer + at, sizeof(word));
		word = mpsd_embedded_word(word, conditions);
		memcpy(made->launch.buffer + at, &word, sizeof(word));
	}
	return made;
}
