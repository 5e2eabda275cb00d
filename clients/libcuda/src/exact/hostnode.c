// SPDX-License-Identifier: MIT
/*
 * Functions of the host that are nodes of graphs. The driver gets a function of this library's, which is counted while the
 * program's runs, so that its copy of the driver is not unloaded meanwhile. In a copy that was left no function begins.
 */
#include <stdlib.h>

#include "exact/hostfunc.h"

#define BUCKETS 256

/* What a copy of the driver is given; graphs of the program may have it as long as they like, so it is kept. */
struct given {
	struct given *next;
	CUhostFn function;
	void *data;
	uint64_t moves;		/* before that copy */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct given *givens[BUCKETS];

static void CUDA_CB run(void *with)
{
	const struct given *given = with;
	atomic_uint *inside = given->moves ? mpsd_inside_of(given->moves) : NULL;

	if (inside)
		atomic_fetch_add(inside, 1);
	if (atomic_load(&mpsd_tables_now)->moves == given->moves) {
		mpsd_thread.in_host_function = true;
		given->function(given->data);
		mpsd_thread.in_host_function = false;
	}
	if (inside)
		atomic_fetch_sub(inside, 1);
}

/* Of this call's copy; what is made ahead is for the one after the next move. */
static uint64_t moves_here(void)
{
	return mpsd_thread_is_ahead ? mpsd_moves_done() + 2 : mpsd_tables()->moves;
}

static struct given *find(const struct mpsd_op *op, uint64_t moves)
{
	uint64_t key = ((uintptr_t)op->call.function ^ (uintptr_t)op->call.data ^ moves) * 0x9e3779b97f4a7c15ull >> 56;
	struct given *given = givens[key];

	while (given && (given->function != op->call.function || given->data != op->call.data || given->moves != moves))
		given = given->next;
	if (given || !(given = malloc(sizeof(*given))))
		return given;
	*given = (struct given){ givens[key], op->call.function, op->call.data, moves };
	return givens[key] = given;
}

bool mpsd_hostnode_native(const struct mpsd_op *op, CUDA_HOST_NODE_PARAMS *native)
{
	pthread_mutex_lock(&lock);
	*native = (CUDA_HOST_NODE_PARAMS){ run, find(op, moves_here()) };
	pthread_mutex_unlock(&lock);
	return native->userData != NULL;
}

void mpsd_hostnode_name(CUDA_HOST_NODE_PARAMS *params)
{
	const struct given *given = params->userData;

	if (params->fn == run)
		*params = (CUDA_HOST_NODE_PARAMS){ given->function, given->data };
}

void mpsd_hostnode_child(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
