// SPDX-License-Identifier: MIT
/*
 * Graphs: what was submitted to capturing streams (capture.c), or made node by node (nodes.c), is submitted again by a
 * launch, one operation after the other.
 */
#include <stdlib.h>
#include <string.h>

#include "standin.h"

static const char own;

bool is_graph(const struct CUgraph_st *graph)
{
	must_live(graph);
	return graph && graph->sign == &own;
}

/* No context's: they are there until somebody ends them, or this library goes. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUgraph graphs;

CUgraph new_child(void)
{
	CUgraph graph = calloc(1, sizeof(*graph));

	is_new(graph);
	if (graph)
		graph->sign = &own;
	return graph;
}

CUgraph new_graph(void)
{
	CUgraph graph = new_child();

	if (!graph)
		return NULL;
	pthread_mutex_lock(&lock);
	graph->next = graphs;
	graphs = graph;
	pthread_mutex_unlock(&lock);
	return graph;
}

static void strike(CUgraph graph)
{
	CUgraph *link = &graphs;

	pthread_mutex_lock(&lock);
	while (*link && *link != graph)
		link = &(*link)->next;
	if (*link)
		*link = graph->next;
	pthread_mutex_unlock(&lock);
}

void disown_graph(CUgraph graph)
{
	strike(graph);
	graph->next = NULL;
}

static void free_node(CUgraphNode node)
{
	free_graph(node->child);
	for (unsigned int i = 0; i < node->bodies_count; i++)
		free_graph(node->bodies[i]);
	free(node->bodies);
	free(node->after);
	free(node->data);
	is_gone(node);
	free(node);
}

static void drop_edges(CUgraphNode node, const struct CUgraphNode_st *to)
{
	size_t kept = 0;

	for (size_t i = 0; i < node->count; i++)
		if (node->after[i] != to) {
			if (node->data)
				node->data[kept] = node->data[i];
			node->after[kept++] = node->after[i];
		}
	node->count = kept;
}

void remove_node(CUgraphNode node)
{
	CUgraph graph = node->graph;
	size_t at = 0;

	while (graph->nodes[at] != node)
		at++;
	graph->count--;
	for (size_t i = at; i < graph->count; i++)
		graph->nodes[i] = graph->nodes[i + 1];
	for (size_t i = 0; i < graph->count; i++)
		drop_edges(graph->nodes[i], node);
	free_node(node);
}

void free_graph(CUgraph graph)
{
	for (size_t i = 0; graph && i < graph->count; i++)
		free_node(graph->nodes[i]);
	if (!graph)
		return;
	strike(graph);
	free(graph->nodes);
	is_gone(graph);
	free(graph);
}

static __attribute__((destructor)) void free_graphs(void)
{
	while (graphs)
		free_graph(graphs);
}

CUgraphNode add_node(CUgraph graph, CUgraphNodeType type, const struct operation *operation)
{
	CUgraphNode *larger = realloc(graph->nodes, (graph->count + 1) * sizeof(*larger));
	CUgraphNode node = calloc(1, sizeof(*node));

	if (larger)
		graph->nodes = larger;
	if (!larger || !node) {
		free(node);
		return NULL;
	}
	is_new(node);
	node->graph = graph;
	node->type = type;
	if (operation)
		node->operation = *operation;
	return graph->nodes[graph->count++] = node;
}
