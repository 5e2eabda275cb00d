/* SPDX-License-Identifier: MIT */
/*
 * What a graph consists of. Of one that was captured: the operations, in the order in which they were captured
 * (graph.c). Of one that was made node by node: what each node is, and what it comes after (built.c). A launch holds
 * the graph as it was then: whoever changes one that others hold changes a copy of it (mpsd_graph_own()).
 */
#pragma once

#include "failover/graph.h"

struct mpsd_node {
	CUgraphNode name;		/* what the program calls it; NULL: it does not know of it */
	CUgraphNode native;		/* in the program's graph, in the copy in which that is there */
	struct mpsd_op *op;		/* NULL: it is empty, or a graph */
	struct mpsd_graph *child;	/* a reference to it */
	CUcontext context;		/* what the program called that which it is to run in; NULL: it named none */
	unsigned int *after, count;	/* nodes of the same graph */
	CUgraphEdgeData *edges;		/* of each of those; NULL: they are plain */
	struct mpsd_embedded *embedded;	/* graphs that are this node's (embedded.h); NULL: none */
	struct mpsd_graph **bodies;	/* in a snapshot: what those are; NULL: the program may still change them */
};

struct mpsd_embedded;
struct mpsd_condition;

struct mpsd_graph {
	atomic_uint references;
	CUstream origin;		/* of the capture */
	bool is_built;			/* node by node */
	bool has_host;			/* it reads or writes memory of the host's */
	bool is_special;		/* it records events, waits for them, or for words in memory */
	struct mpsd_node *nodes;
	unsigned int count, room;
	bool has_embedded;
	bool is_conditional;		/* what its launch does depends on what is done */
	struct mpsd_condition *conditions;
	unsigned int conditions_count;
	uint64_t descent;		/* that of those that it is a copy of */
	uint64_t copied;		/* the descent of the graph that it was cloned from; 0: of none */
	unsigned int copied_count;	/* and the nodes that had */
	bool is_unordered;		/* something comes after what was made later */
};

/*
 * CUDA_CHILD_GRAPH_NODE_PARAMS.ownership, behind the graph; cuda.h before 12.9 lacks it. 0: the graph is cloned, 1: it becomes
 * the node's.
 */
#define MPSD_NODE_OWNS 1u

static inline uint32_t *mpsd_node_ownership(CUgraphNodeParams *given)
{
	_Static_assert(sizeof(given->reserved1[0]) == sizeof(CUgraph), "so that ownership begins the second word");
	return (uint32_t *)(void *)&given->reserved1[1];
}

static inline uint32_t mpsd_node_ownership_of(const CUgraphNodeParams *given)
{
	CUgraphNodeParams copy = *given;

	return *mpsd_node_ownership(&copy);
}

/* NULL: no memory. */
struct mpsd_graph *mpsd_graph_new(CUstream origin, bool is_built);

/*
 * Takes the operation, the reference to the child and what `after` is in; of those that were captured, NULL and 0. False:
 * no memory, and they are taken all the same.
 */
bool mpsd_graph_append(struct mpsd_graph *graph, struct mpsd_node node);

/* `to` comes after `from`; `edge` NULL: it is plain. False: no memory. */
bool mpsd_graph_depends(struct mpsd_graph *graph, unsigned int from, unsigned int to, const CUgraphEdgeData *edge);

/* It does so no more. False: there was no such edge. */
bool mpsd_graph_parts(struct mpsd_graph *graph, unsigned int from, unsigned int to, const CUgraphEdgeData *edge);

/* That node goes, with its edges; those behind it have other numbers. */
void mpsd_graph_strike(struct mpsd_graph *graph, unsigned int number);

/* The same graph once more. NULL: no memory. */
struct mpsd_graph *mpsd_graph_copy(const struct mpsd_graph *graph);

/* A graph that is nobody else's. */
void mpsd_graph_become(struct mpsd_graph *graph, unsigned int number, const struct mpsd_node *other);
bool mpsd_graph_add_condition(struct mpsd_graph *graph, const struct mpsd_condition *condition);	/* false: no memory */
void mpsd_graph_has(struct mpsd_graph *graph, const struct mpsd_graph *other);	/* as a part */

/* A copy in which that node is what the other is, which it shares. NULL: no memory. */
struct mpsd_graph *mpsd_graph_with(const struct mpsd_graph *graph, unsigned int number, const struct mpsd_node *node);

/* One of its own descent, as cuGraphClone() makes it; its nodes have the names of the other's. NULL: no memory. */
struct mpsd_graph *mpsd_graph_clone(const struct mpsd_graph *graph);

/* The same of an executable graph, of a node of a graph that is embedded in it. */
CUresult mpsd_node_note_embedded(const void *name, CUgraphNode node_name, const struct mpsd_node *node);

/* The same of the graph, or the executable one, of that name. AGAIN: the copy was left. */
CUresult mpsd_node_note(const void *name, unsigned int number, const struct mpsd_node *node);

/* Numbers in which all comes after what it depends on; NULL: they are in that order. In *made what is to be freed. */
const unsigned int *mpsd_graph_order(const struct mpsd_graph *graph, unsigned int **made);

/* The node's number in a graph or what was one. graph->count: there is none that is known to be it. */
unsigned int mpsd_graph_number(const struct mpsd_graph *graph, CUgraphNode name);
unsigned int mpsd_graph_number_native(const struct mpsd_graph *graph, CUgraphNode native, unsigned int hint);

/* Under the lock of made.h: the record's graph, which nobody else holds then. NULL: no memory. */
struct mpsd_graph *mpsd_graph_own(struct mpsd_made *made);

/* Where what a node is goes: into an executable graph or a node, if there is one, or into a new one, which is `node` then. */
struct mpsd_node_place {
	CUgraphExec exec;
	CUgraphNode node;
	CUgraph graph;
	const CUgraphNode *after;	/* node->count of them */
	CUgraph child;			/* of one that is a graph */
	const struct mpsd_pairs *conditions;	/* of what the program does not change; NULL: it does */
	CUgraph *bodies;		/* of a conditional one that was added: the driver's own array */
};

/* give.c: all by the names of the copy of this call. */
CUresult mpsd_node_give(const struct mpsd_node *node, struct mpsd_node_place *place);

/* rebuild.c: the graph made in the copy of this call. `natives`: what its nodes are called there; NULL: nobody asks.
 * `put`: for what is embedded in a snapshot; NULL: it is a graph that the program changes, and records are told. */
CUresult mpsd_graph_make(const struct mpsd_graph *graph, CUgraph *native, CUgraphNode *natives, struct mpsd_put *put);

/*
 * An executable graph there. What it is made from is kept in *put, for by its nodes it is changed. Where that fails nothing
 * is.
 */
CUresult mpsd_exec_make(const struct mpsd_graph *graph, unsigned int flags, CUgraphExec *exec, struct mpsd_put *put);

/*
 * captured.c: a capture into a graph of the program's has ended so. What was captured is the graph's from now on, where that
 * can be known. AGAIN: the copy was left.
 */
CUresult mpsd_captured_into(CUresult result, CUgraph name, struct mpsd_graph *captured);

/*
 * Before the program adds nodes or edges to a graph, or takes them away: one that was captured consists of nodes from then
 * on, for it is not captured again as it was. It is there in this copy.
 */
void mpsd_captured_built(CUgraph name);

/* Under the lock: nodes that the program knows of have other numbers now. */
void mpsd_captured_number(const struct mpsd_graph *graph);

/* graph.c: the one node that what is captured next comes after; NULL: there is none, or several. */
CUgraphNode mpsd_capture_last(CUstream native);

/* built.c: what the copy of this call calls a node, and the program its graph, which is there then. */
CUresult mpsd_node_native(CUgraphNode name, CUgraphNode *native, CUgraph *graph);

/* What number a node has in graphs of that descent; UINT32_MAX: it is not known. `descent` 0: in its own. */
unsigned int mpsd_node_number(CUgraphNode name, uint64_t descent);

/* Where the program wants a new node, by its names. */
struct mpsd_addition {
	CUgraphNode *node;		/* it looks for the node there */
	CUgraph graph;
	const CUgraphNode *after;
	size_t count;
	const CUgraphEdgeData *edges;	/* NULL: they are plain */
	CUgraph **bodies;		/* NULL, or where the names of the graphs of a conditional node are told */
};

/* These take what the node is. `child`: what this copy calls it. */
CUresult mpsd_node_add(const struct mpsd_addition *addition, struct mpsd_node node, CUgraph child);
CUresult mpsd_node_become(CUgraphNode name, struct mpsd_node node);

void mpsd_node_let_go(const struct mpsd_node *node);

/* Edges in an array of the driver's, by natives, put into or out of a graph of the copy of this call; `edges` NULL: plain. */
CUresult mpsd_edges_add(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edges,
			size_t count);

/* Under the lock: of a graph that consists of nodes, as the record's own. NULL: it is not known so. */
struct mpsd_graph *mpsd_built_own(CUgraph name);

/* Edges that say no more than that one node comes after another. */
bool mpsd_edges_are_plain(const CUgraphEdgeData *data, size_t count);

CUgraph mpsd_node_graph(CUgraphNode name);

/* What the program calls a node of that graph, which it comes to know of. */
CUgraphNode mpsd_node_name(CUgraph graph, CUgraphNode native, unsigned int hint);

/* execs.c: node by node of the same kinds, after as many others. */
bool mpsd_graph_is_like(const struct mpsd_graph *one, const struct mpsd_graph *other);

/* A node of it is something else now. `child`: what this copy calls the node's. NOT_FOUND: it has no such node. */
CUresult mpsd_exec_change(CUgraphExec name, CUgraphNode node_name, const struct mpsd_node *node, CUgraph child);

/* A record of what was made, or of nothing; takes the reference. */
CUresult mpsd_graph_note(CUresult result, enum mpsd_made_kind kind, void **handle, struct mpsd_graph *graph,
			 unsigned int flags, uint64_t moves);
