// SPDX-License-Identifier: MIT
/* What is known of a name, and what it leads to, for those who do not have the lock of the records. */
#include "failover/graph.h"
#include "failover/made.h"

bool mpsd_made_is_apart(const void *name)
{
	const struct mpsd_made *made = mpsd_made_look(name);
	bool is = made && made->kind == MPSD_MADE_STREAM && made->flags & CU_STREAM_NON_BLOCKING;

	mpsd_made_looked();
	return is;
}

struct mpsd_graph *mpsd_made_graph(const void *name)
{
	const struct mpsd_made *made = mpsd_made_look(name);
	struct mpsd_graph *graph = NULL;

	if (made && (made->kind == MPSD_MADE_GRAPH || made->kind == MPSD_MADE_EXEC))
		graph = made->graph ? mpsd_graph_hold(made->graph) : NULL;
	mpsd_made_looked();
	return graph;
}

bool mpsd_made_is(const void *name, enum mpsd_made_kind kind)
{
	const struct mpsd_made *made = mpsd_made_look(name);
	bool is = made && made->kind == kind;

	mpsd_made_looked();
	return is;
}

CUresult mpsd_made_late(const void *name, void **native, CUresult (*make)(struct mpsd_made *made, void **native))
{
	CUresult result = CUDA_SUCCESS;
	struct mpsd_made *made;
	void *there = NULL;

	*native = mpsd_native((void *)name);
	if (*native)
		return result;
	*native = (void *)name;
	mpsd_made_lock();
	made = mpsd_made_find(name);
	if (made && mpsd_is_left())
		result = MPSD_AGAIN;
	else if (made && !made->native)
		result = make(made, &there);
	if (there && result == CUDA_SUCCESS)
		mpsd_made_native(made, there);
	if (made)
		*native = made->native;
	mpsd_made_unlock();
	return result;
}
