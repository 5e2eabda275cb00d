// SPDX-License-Identifier: MIT
/* Operations, given to the driver: the first time as the program did, and again in another copy. */
#include <stdlib.h>
#include <string.h>

#include "exact/copier.h"
#include "exact/shelf.h"
#include "exact/state.h"
#include "failover/embedded.h"
#include "failover/graph.h"

#define FEW 4u			/* attributes of a launch */

void mpsd_op_share(struct mpsd_op *op)
{
	atomic_fetch_add(&op->shares, 1);
}

static void end(struct mpsd_op *op, void (*give_back)(struct mpsd_shelf *shelf))
{
	/* Nobody can come to share what nobody else has. */
	if (atomic_load(&op->shares) && atomic_fetch_sub(&op->shares, 1) > 0)
		return;
	if (op->kind == MPSD_OP_COPY) {
		free(op->copy.kept);
	} else if (op->kind == MPSD_OP_GRAPH) {
		mpsd_graph_let_go(op->graph.graph);
	} else if (op->kind == MPSD_OP_MEMORY) {
		free(op->memory);
	} else if (op->kind == MPSD_OP_HOST) {
		mpsd_host_let_go(op->host);
	}
	if (op->shelf)
		give_back(op->shelf);
	else
		free(op);
}

void mpsd_op_free(struct mpsd_op *op)
{
	end(op, mpsd_shelf_give);
}

void mpsd_op_forget(struct mpsd_op *op)
{
	end(op, mpsd_shelf_take_back);
}

/* `alone`: what comes before it is not what the program had before it, so it begins when that has ended. */
static void translate(const struct mpsd_op *op, bool alone, CUlaunchAttribute *attributes)
{
	for (unsigned int i = 0; i < op->launch.config.numAttrs; i++) {
		attributes[i] = op->launch.attributes[i];
		mpsd_attribute_native(&attributes[i]);
		if (alone && attributes[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
			attributes[i].value.programmaticStreamSerializationAllowed = 0;
	}
}

static CUresult launch_with(const struct mpsd_op *op, CUstream stream, void **extra, bool alone)
{
	CUlaunchConfig config = op->launch.config;
	CUlaunchAttribute few[FEW];
	CUresult result;

	config.hStream = stream;
	config.attrs = config.numAttrs <= FEW ? few : malloc(config.numAttrs * sizeof(*config.attrs));
	if (!config.attrs)
		return CUDA_ERROR_OUT_OF_MEMORY;
	translate(op, alone, config.attrs);
	result = inner_cuLaunchKernelEx(&config, mpsd_native(op->launch.function),
					extra ? NULL : op->launch.parameters, extra);
	if (config.attrs != few)
		free(config.attrs);
	return result;
}

static inline CUresult launch_plain(const struct mpsd_op *op, CUstream stream, void **parameters, void **extra)
{
	const CUlaunchConfig *c = &op->launch.config;

	return inner_cuLaunchKernel(mpsd_native(op->launch.function), c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX,
				    c->blockDimY, c->blockDimZ, c->sharedMemBytes, stream, parameters, extra);
}

static CUresult launch_as_it_is(const struct mpsd_op *op, CUstream stream, bool alone)
{
	const CUlaunchConfig *c = &op->launch.config;
	CUfunction function = mpsd_native(op->launch.function);
	size_t bytes = op->launch.bytes;
	void *given[] = { CU_LAUNCH_PARAM_BUFFER_POINTER, op->launch.buffer, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
			  CU_LAUNCH_PARAM_END };
	void **extra = op->launch.is_buffer ? given : NULL;

	if (op->launch.is_cooperative)
		return inner_cuLaunchCooperativeKernel(function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX,
						       c->blockDimY, c->blockDimZ, c->sharedMemBytes, stream,
						       op->launch.parameters);
	if (!op->launch.is_plain)
		return launch_with(op, stream, extra, alone);
	return launch_plain(op, stream, extra ? NULL : op->launch.parameters, extra);
}

static CUresult launch(const struct mpsd_op *op, CUstream stream, bool alone)
{
	struct mpsd_op *here;
	CUresult result;

	if (!mpsd_embedded_are_other())
		return launch_as_it_is(op, stream, alone);
	here = mpsd_embedded_launch(op, NULL);
	if (!here)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = launch_as_it_is(here, stream, alone);
	mpsd_op_free(here);
	return result;
}

static CUresult copy_now(const struct mpsd_op *op)
{
	const void *from = op->copy.kept ? op->copy.kept : (const void *)op->copy.from;

	switch (op->copy.way) {
	case MPSD_COPY_IN:
		return inner_cuMemcpyHtoD_v2(mpsd_address(op->copy.to), from, op->copy.size);
	case MPSD_COPY_WITHIN:
		if (op->copy.peer)
			return inner_cuMemcpyPeer(mpsd_address(op->copy.to), mpsd_native(op->copy.peer),
						  mpsd_address(op->copy.from), mpsd_native(op->copy.peer),
						  op->copy.size);
		return inner_cuMemcpyDtoD_v2(mpsd_address(op->copy.to), mpsd_address(op->copy.from), op->copy.size);
	default:
		return inner_cuMemcpy(mpsd_address(op->copy.to), mpsd_address((CUdeviceptr)from), op->copy.size);
	}
}

static CUresult copy(const struct mpsd_op *op, CUstream stream)
{
	const void *from = op->copy.kept ? op->copy.kept : (const void *)op->copy.from;

	switch (op->copy.way) {
	case MPSD_COPY_IN:
		return inner_cuMemcpyHtoDAsync_v2(mpsd_address(op->copy.to), from, op->copy.size, stream);
	case MPSD_COPY_OUT:
		return inner_cuMemcpyDtoHAsync_v2((void *)op->copy.to, mpsd_address(op->copy.from), op->copy.size, stream);
	case MPSD_COPY_WITHIN:
		if (op->copy.peer)
			return inner_cuMemcpyPeerAsync(mpsd_address(op->copy.to), mpsd_native(op->copy.peer),
						       mpsd_address(op->copy.from), mpsd_native(op->copy.peer),
						       op->copy.size, stream);
		return inner_cuMemcpyDtoDAsync_v2(mpsd_address(op->copy.to), mpsd_address(op->copy.from),
						  op->copy.size, stream);
	default:
		return inner_cuMemcpyAsync(mpsd_address(op->copy.to), mpsd_address((CUdeviceptr)from),
					   op->copy.size, stream);
	}
}

static CUresult set_now(const struct mpsd_op *op)
{
	switch (op->set.width) {
	case 1:
		return inner_cuMemsetD8_v2(mpsd_address(op->set.to), (unsigned char)op->set.value, op->set.count);
	case 2:
		return inner_cuMemsetD16_v2(mpsd_address(op->set.to), (unsigned short)op->set.value, op->set.count);
	default:
		return inner_cuMemsetD32_v2(mpsd_address(op->set.to), op->set.value, op->set.count);
	}
}

static CUresult set(const struct mpsd_op *op, CUstream stream)
{
	switch (op->set.width) {
	case 1:
		return inner_cuMemsetD8Async(mpsd_address(op->set.to), (unsigned char)op->set.value, op->set.count, stream);
	case 2:
		return inner_cuMemsetD16Async(mpsd_address(op->set.to), (unsigned short)op->set.value, op->set.count, stream);
	default:
		return inner_cuMemsetD32Async(mpsd_address(op->set.to), op->set.value, op->set.count, stream);
	}
}

static CUresult issue(const struct mpsd_op *op, CUstream stream);

static CUresult issue_alone(const struct mpsd_op *op, CUstream stream)
{
	return op->kind == MPSD_OP_LAUNCH ? launch(op, stream, true) : issue(op, stream);
}

static CUresult issue_part(const struct mpsd_op *op, void *stream)
{
	if (op->kind == MPSD_OP_GRAPH)
		return mpsd_op_issue_parts(op, stream);
	/* Of what was captured these are edges. */
	if (op->kind == MPSD_OP_WAIT || (op->kind == MPSD_OP_RECORD && !mpsd_op_is_event_node(op)))
		return CUDA_SUCCESS;
	/* Outside of a capture that is an event like any other. */
	if (op->kind == MPSD_OP_RECORD)
		return inner_cuEventRecord(mpsd_native(op->event.event), stream);
	return issue_alone(op, stream);
}

static CUresult capture_part(const struct mpsd_op *op, void *stream)
{
	if (op->kind == MPSD_OP_GRAPH)
		return mpsd_op_capture_parts(op, stream);
	return mpsd_op_is_event_node(op) ? issue_alone(op, stream) : issue_part(op, stream);
}

CUresult mpsd_op_capture_parts(const struct mpsd_op *op, CUstream stream)
{
	return mpsd_graph_each(op->graph.graph, capture_part, stream);
}

CUresult mpsd_op_issue_parts(const struct mpsd_op *op, CUstream stream)
{
	return mpsd_graph_each(op->graph.graph, issue_part, stream);
}

/* What was launched is no more what the executable graph is: it was updated since, and other launches are its. */
static bool is_changed(const struct mpsd_op *op)
{
	struct mpsd_graph *now = mpsd_made_graph(op->graph.exec);

	mpsd_graph_let_go(now);
	return now != op->graph.graph;
}

static CUresult launch_graph(const struct mpsd_op *op, CUstream stream)
{
	CUgraphExec native;
	CUresult result;

	if (is_changed(op))
		return mpsd_graph_is_conditional(op->graph.graph) ? mpsd_exec_launch_once(op->graph.graph, stream)
								   : mpsd_op_issue_parts(op, stream);
	result = mpsd_exec_native(op->graph.exec, &native);
	return result == CUDA_SUCCESS ? inner_cuGraphLaunch(native, stream) : result;
}

static CUresult call(const struct mpsd_op *op, CUstream stream)
{
	CUDA_HOST_NODE_PARAMS given;

	if (!mpsd_hostnode_native(op, &given))
		return CUDA_ERROR_OUT_OF_MEMORY;
	return inner_cuLaunchHostFunc(stream, given.fn, given.userData);
}

CUresult mpsd_op_issue_on(const struct mpsd_op *op, CUstream stream, CUevent event)
{
	switch (op->kind) {
	case MPSD_OP_LAUNCH:
		return launch(op, stream, false);
	case MPSD_OP_COPY:
		return op->copy.rows ? mpsd_rows_issue(op, stream) : copy(op, stream);
	case MPSD_OP_SET:
		return op->set.has_rows ? mpsd_rows_issue(op, stream) : set(op, stream);
	case MPSD_OP_RECORD:
		if (op->event.is_flagged)
			return inner_cuEventRecordWithFlags(event, stream, op->event.flags);
		return inner_cuEventRecord(event, stream);
	case MPSD_OP_GRAPH:
		return launch_graph(op, stream);
	case MPSD_OP_HOST:
		return mpsd_host_issue(op->host, stream);
	case MPSD_OP_MEMORY:
		return mpsd_memops_issue(op->memory, stream);
	case MPSD_OP_CALL:
		return call(op, stream);
	default:
		return inner_cuStreamWaitEvent(stream, event, op->event.flags);
	}
}

static CUresult issue(const struct mpsd_op *op, CUstream stream)
{
	bool names = op->kind == MPSD_OP_RECORD || op->kind == MPSD_OP_WAIT;

	return mpsd_op_issue_on(op, stream, names ? mpsd_native(op->event.event) : NULL);
}

MPSD_OF_A_LAUNCH CUresult mpsd_op_launch(const struct mpsd_op *op)
{
	if (__builtin_expect(!op->launch.is_plain || op->launch.is_buffer, 0))
		return launch(op, mpsd_native(op->stream), false);
	return launch_plain(op, mpsd_native(op->stream), op->launch.parameters, NULL);
}

CUresult mpsd_op_issue(const struct mpsd_op *op)
{
	/* Who has the order has come behind it; others have none, for the mode has ended. */
	if (!mpsd_relay_flush())
		return MPSD_AGAIN;
	if (!op->waits && op->kind == MPSD_OP_COPY && op->copy.is_by_kernel)
		return mpsd_copier_issue(op);
	if (!op->waits)
		return issue(op, mpsd_native(op->stream));
	if (op->kind == MPSD_OP_SET ? op->set.has_rows : op->copy.rows != NULL)
		return mpsd_rows_issue_now(op);
	return op->kind == MPSD_OP_SET ? set_now(op) : copy_now(op);
}

CUresult mpsd_op_again(const struct mpsd_op *op)
{
	return op->kind == MPSD_OP_WAIT ? CUDA_SUCCESS : issue_alone(op, CU_STREAM_LEGACY);
}
