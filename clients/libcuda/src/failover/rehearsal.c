// SPDX-License-Identifier: MIT
/*
 * What a context needs for its work the driver's library takes when that is first given, and more of it the more of it is
 * under way: pinned pages for what is copied from pageable memory, room for what is submitted. In a move all that was in
 * flight is given at once, and then the resource manager may be at a fault for 0.15 s, and give nothing. So it is given
 * something before, as much as comes to be under way, and the driver keeps what it has taken.
 */
#include "failover/rehearsal.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "clock.h"
#include "failover/made.h"

#define OPERATIONS 640		/* under way at once; the driver keeps who is a thousand ahead */
#define LARGE ((size_t)1 << 20)
#define SMALL ((size_t)4 << 10)
#define MOST_PARAMETERS 32768
#define HELD_MS 100
#define END_MS 200

/* In the stream: what is given meanwhile is under way. */
static void CUDA_CB hold(void *held)
{
	for (int ms = 0; ms < HELD_MS && atomic_load((atomic_bool *)held); ms++)
		mpsd_pause(1);
}

static CUresult give_one(unsigned int number, CUdeviceptr room, const void *bytes)
{
	switch (number % 4) {
	case 0:
		return other_cuMemcpyHtoDAsync_v2(room, bytes, SMALL, CU_STREAM_LEGACY);
	case 1:
		return other_cuMemcpyDtoDAsync_v2(room, room + LARGE, SMALL, CU_STREAM_LEGACY);
	default:
		return other_cuMemsetD32Async(room, number, 1, CU_STREAM_LEGACY);
	}
}

static void give_all(CUdeviceptr room, const void *bytes)
{
	static atomic_bool held;	/* for ever: the function may come late */
	CUresult result = other_cuMemcpyHtoDAsync_v2(room, bytes, LARGE, CU_STREAM_LEGACY);

	if (result == CUDA_SUCCESS)
		result = other_cuMemcpyDtoDAsync_v2(room, room + LARGE, LARGE, CU_STREAM_LEGACY);
	atomic_store(&held, true);
	if (result == CUDA_SUCCESS)
		result = other_cuLaunchHostFunc(CU_STREAM_LEGACY, hold, &held);
	for (unsigned int i = 0; i < OPERATIONS && result == CUDA_SUCCESS; i++)
		result = give_one(i, room, bytes);
	atomic_store(&held, false);
}

static bool comes_to_its_end(void)
{
	CUresult result = CUDA_ERROR_NOT_READY;

	for (int ms = 0; ms < END_MS && result == CUDA_ERROR_NOT_READY; ms++) {
		result = other_cuStreamQuery(CU_STREAM_LEGACY);
		if (result == CUDA_ERROR_NOT_READY)
			mpsd_pause(1);
	}
	return result == CUDA_SUCCESS;
}

/*
 * Of what came since the last time. Without the records, which go on changing: code is not unloaded while the context is
 * held.
 */
struct code {
	void *twin;
	bool is_kernel;
};

static struct code *list_code(CUdevice device, unsigned int *count)
{
	struct code *list = NULL;
	unsigned int room = 0;

	*count = 0;
	for (struct mpsd_made *made = mpsd_made_oldest(); made; made = made->newer)
		room += mpsd_made_is_code(made);
	if (room)
		list = calloc(room, sizeof(*list));
	for (struct mpsd_made *made = mpsd_made_oldest(); list && made; made = made->newer) {
		if (!mpsd_made_is_code(made) || !made->is_twin || made->is_rehearsed || made->device != device)
			continue;
		made->is_rehearsed = true;
		list[(*count)++] = (struct code){ made->twin, made->kind == MPSD_MADE_KERNEL };
	}
	return list;
}

static CUresult ask_parameter(const struct code *code, size_t number, size_t *offset, size_t *size)
{
	if (code->is_kernel)
		return mpsd_other[MPSD_cuKernelGetParamInfo]
			       ? other_cuKernelGetParamInfo(code->twin, number, offset, size)
			       : CUDA_ERROR_NOT_FOUND;
	return mpsd_other[MPSD_cuFuncGetParamInfo] ? other_cuFuncGetParamInfo(code->twin, number, offset, size)
						    : CUDA_ERROR_NOT_FOUND;
}

/* False: nobody knows. */
static bool parameters_of(const struct code *code, size_t *bytes)
{
	size_t offset, size, number = 0;
	CUresult result;

	*bytes = 0;
	while ((result = ask_parameter(code, number++, &offset, &size)) == CUDA_SUCCESS)
		if (offset + size > *bytes)
			*bytes = offset + size;
	return result == CUDA_ERROR_INVALID_VALUE && *bytes <= MOST_PARAMETERS;
}

static void add_node(CUgraph graph, const struct code *code, CUcontext context, void *zeroes)
{
	size_t bytes;
	void *extra[] = { CU_LAUNCH_PARAM_BUFFER_POINTER, zeroes, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
			  CU_LAUNCH_PARAM_END };
	CUDA_KERNEL_NODE_PARAMS given = {
		.gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1, .blockDimZ = 1,
		.extra = extra, .ctx = context,
	};
	CUgraphNode node;

	if (!parameters_of(code, &bytes))
		return;
	if (!bytes)
		given.extra = NULL;
	if (code->is_kernel)
		given.kern = code->twin;
	else
		given.func = code->twin;
	other_cuGraphAddKernelNode_v2(&node, graph, NULL, 0, &given);
}

/*
 * A graph of all functions that the program has asked for, which is never launched: what the context needs for one of them
 * (a place for what device code prints, or where it fails) is taken when such a graph is made.
 */
static void prepare_code(CUcontext context, const struct code *list, unsigned int count)
{
	void *zeroes = calloc(1, MOST_PARAMETERS);
	CUgraphExec exec;
	CUgraph graph;

	if (zeroes && other_cuGraphCreate(&graph, 0) == CUDA_SUCCESS) {
		for (unsigned int i = 0; i < count; i++)
			add_node(graph, &list[i], context, zeroes);
		if (other_cuGraphInstantiateWithFlags(&exec, graph, 0) == CUDA_SUCCESS) {
			if (mpsd_other[MPSD_cuGraphUpload])
				other_cuGraphUpload(exec, CU_STREAM_LEGACY);
			other_cuGraphExecDestroy(exec);
		}
		other_cuGraphDestroy(graph);
	}
	free(zeroes);
}

/* In the current context, with work that it may not come to the end of. */
static void prepare_work(void)
{
	void *bytes = calloc(1, LARGE);
	CUdeviceptr room;

	if (bytes && other_cuMemAlloc_v2(&room, 2 * LARGE) == CUDA_SUCCESS) {
		give_all(room, bytes);
		/* Otherwise it goes with the context. */
		if (comes_to_its_end())
			other_cuMemFree_v2(room);
		else
			bytes = NULL;
	}
	free(bytes);
}

/* What goes wrong takes time in a move, and nothing else: but a context that is lost is found out by who uses it next. */
static void rehearse_in(CUcontext context, const struct code *list, unsigned int count, bool is_code_only)
{
	if (other_cuCtxSetCurrent(context) != CUDA_SUCCESS)
		return;
	if (count)
		prepare_code(context, list, count);
	if (!is_code_only)
		prepare_work();
}

/* The context after that one, held; NULL: there is no more. */
static struct mpsd_made *hold_context(CUdevice after, struct code **list, unsigned int *count)
{
	struct mpsd_made *found = NULL;

	mpsd_made_lock();
	for (struct mpsd_made *made = mpsd_made_oldest(); made; made = made->newer)
		if (made->kind == MPSD_MADE_CONTEXT && made->is_twin && made->device > after &&
		    (!found || made->device < found->device))
			found = made;
	if (found) {
		*list = list_code(found->device, count);
		mpsd_made_hold(found);
	}
	mpsd_made_unlock();
	return found;
}

static void rehearse(bool is_code_only)
{
	struct mpsd_made *context;
	struct code *list = NULL;
	unsigned int count = 0;

	for (CUdevice device = -1; (context = hold_context(device, &list, &count));) {
		device = context->device;
		rehearse_in(context->twin, list, count, is_code_only);
		free(list);
		mpsd_made_lock();
		mpsd_made_let_go();
		mpsd_made_unlock();
	}
}

void mpsd_rehearse(void)
{
	mpsd_made_take_code();
	rehearse(false);
}

void mpsd_rehearse_code(void)
{
	if (mpsd_made_take_code())
		rehearse(true);
}
