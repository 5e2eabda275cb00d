/* SPDX-License-Identifier: MIT */
/*
 * Graphs that belong to a node of another graph, and that the program changes by names of their own: those of a conditional
 * node, and a child graph that was moved into its node. In a graph that the program still changes, such a node has their
 * names. In one that was instantiated it has what they were then (mpsd_embedded_snapshot()).
 */
#pragma once

#include "failover/nodes.h"

struct mpsd_embedded {
	atomic_uint references;
	bool is_moved;
	CUgraphConditionalHandle handle;	/* by the program's name, like all of these */
	CUgraphConditionalNodeType type;
	unsigned int size;
	CUgraph names[];
};

/* Of a handle of a conditional node: how it is made. */
struct mpsd_condition {
	CUgraphConditionalHandle name;
	CUcontext context;
	unsigned int value, flags;
};

/* NULL: no memory. */
struct mpsd_embedded *mpsd_embedded_new(unsigned int size);
struct mpsd_embedded *mpsd_embedded_hold(struct mpsd_embedded *embedded);
void mpsd_embedded_let_go(struct mpsd_embedded *embedded);

/* Without the lock: what the graph of that name is now, for good; a reference. NULL: it is not known. */
struct mpsd_graph *mpsd_embedded_snapshot(CUgraph name);

/* Without the lock: graphs of the node, which is noted, become known. False: there is no memory, or the copy was left. */
bool mpsd_embedded_note(CUgraphNode name, struct mpsd_embedded *embedded, const CUgraph *natives, uint64_t moves);

/* A node of a graph in a snapshot, by its name. NULL: there is none. */
const struct mpsd_node *mpsd_embedded_find(const struct mpsd_graph *graph, CUgraphNode name);

/* That node is something else now. The graph is nobody else's. False: no memory, or there is no such node. */
bool mpsd_embedded_become(struct mpsd_graph *graph, CUgraphNode name, const struct mpsd_node *what);

/* Whether each handle of a conditional node is known to kernels by their parameters alone, as far as that can be told. */
bool mpsd_embedded_are_told(const struct mpsd_graph *graph);

/* Pairs of what the program calls something, and what a graph that was made from a snapshot does. */
bool mpsd_pairs_add(struct mpsd_pairs *pairs, uint64_t name, uint64_t native);	/* false: no memory */
bool mpsd_pairs_find(const struct mpsd_pairs *pairs, uint64_t name, uint64_t *native);
bool mpsd_pairs_copy(const struct mpsd_pairs *pairs, struct mpsd_pairs *to);

/* What a word of a kernel's parameters is in the copy of this call. `conditions` NULL: in graphs that the program changes. */
uint64_t mpsd_embedded_word(uint64_t word, const struct mpsd_pairs *conditions);

/* How many handles of conditional nodes there have been. */
extern atomic_uint mpsd_embedded_conditions;

/* Whether parameters of kernels may have handles of another copy. */
static inline bool mpsd_embedded_are_other(void)
{
	return __builtin_expect(atomic_load_explicit(&mpsd_embedded_conditions, memory_order_relaxed) != 0, 0) &&
	       mpsd_tables()->moves;
}

/* A copy of it in which handles of conditional nodes are those of this copy. NULL: no memory. */
struct mpsd_op *mpsd_embedded_launch(const struct mpsd_op *op, const struct mpsd_pairs *conditions);
