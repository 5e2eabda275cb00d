// SPDX-License-Identifier: MIT
/* The program's calls, as operations. carry.c calls these, and only where the mode is `exact`. */
#include <stdlib.h>
#include <string.h>

#include "capture.h"
#include "exact/copier.h"
#include "exact/state.h"
#include "exact/undo.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "failover/pools.h"
#include "failover/room.h"
#include "memory.h"

CUresult mpsd_submit_new(const struct mpsd_op *given, bool proves)
{
	const struct mpsd_rows *rows = given->kind == MPSD_OP_COPY ? given->copy.rows : NULL;
	struct mpsd_op *op = malloc(sizeof(*op) + (rows ? sizeof(*rows) : 0));

	if (!op)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*op = *given;
	if (rows)
		op->copy.rows = memcpy(op + 1, rows, sizeof(*rows));
	return mpsd_submit(op, proves);
}

/* Launches of graphs; those of kernels are in launch.c. */

CUresult make_cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream);

CUresult work_cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream)
{
	struct mpsd_op op = {
		.kind = MPSD_OP_GRAPH,
		.stream = hStream,
		.graph = { .exec = hGraphExec, .graph = mpsd_made_graph(hGraphExec) },
	};

	if (op.graph.graph)
		return mpsd_submit_new(&op, false);
	mpsd_exact_fail("a graph that the proxy has not recorded");
	return mpsd_relay_flush() ? make_cuGraphLaunch(hGraphExec, hStream) : MPSD_AGAIN;
}

/* Copies */

bool mpsd_is_device(CUdeviceptr address)
{
	return mpsd_memory_is_in_window(address) || mpsd_is_variable(address);
}

/* From the host: its bytes are copied, or borrowed until it may know that they were read. */
static CUresult submit_in(struct mpsd_op op, bool is_awaited)
{
	/* What something before it, a copy or a function of the host, will have put there the GPU reads itself. */
	bool is_pinned = mpsd_is_pinned((const void *)op.copy.from);

	if (!is_pinned && op.copy.size <= MPSD_MOST_KEPT && !mpsd_hosts_are_open()) {
		if (!mpsd_copy_keep(&op))
			return CUDA_ERROR_OUT_OF_MEMORY;
		return mpsd_submit_new(&op, is_awaited || op.waits);
	}
	op.copy.is_borrowed = true;
	return mpsd_submit_new(&op, is_awaited || !is_pinned || op.waits);
}

/* The GPU's addresses and those of the host's pinned memory are of one space. */
static bool is_hosts(CUdeviceptr address)
{
	return !mpsd_is_device(address) && mpsd_is_pinned((const void *)address);
}

static CUresult submit_copy(enum mpsd_op_copy way, CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream,
			    bool waits)
{
	struct mpsd_op op = {
		.kind = MPSD_OP_COPY,
		.waits = waits,
		.stream = stream,
		.copy = { .way = way, .to = to, .from = from, .size = size },
	};
	bool is_in, is_awaited;
	CUresult result;

	/* Nothing that could be copied: the driver says so. */
	if (!to || !from || !size)
		return mpsd_submit_new(&op, false);
	/* What the call says of a side need not be so. */
	if ((way == MPSD_COPY_WITHIN && (is_hosts(from) || is_hosts(to))) ||
	    (way == MPSD_COPY_IN && (is_hosts(to) || mpsd_is_device(from))) ||
	    (way == MPSD_COPY_OUT && (is_hosts(from) || mpsd_is_device(to))))
		op.copy.way = way = MPSD_COPY_ANY;
	is_in = way == MPSD_COPY_IN || (way == MPSD_COPY_ANY && !mpsd_is_device(from));
	op.copy.is_from_host = is_in;
	op.copy.is_for_host = way == MPSD_COPY_OUT || (way == MPSD_COPY_ANY && !mpsd_is_device(to));
	/* What the program may read as soon as the call returns. */
	is_awaited = op.copy.is_for_host && (waits || !mpsd_is_pinned((const void *)to));
	if (is_in)
		return submit_in(op, is_awaited);
	/* By pieces, of which none may have been copied when the driver refuses another. */
	if (is_awaited && !mpsd_capturing())
		return mpsd_bounds_refuse(from, size) ? CUDA_ERROR_INVALID_VALUE
						      : mpsd_stage_out((void *)to, from, size, stream);
	if (way == MPSD_COPY_WITHIN && mpsd_copier_at_once(&op, &result))
		return result;
	return mpsd_submit_new(&op, is_awaited);
}

CUresult work_cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream)
{
	return submit_copy(MPSD_COPY_ANY, dst, src, ByteCount, hStream, false);
}

CUresult work_cuMemcpyHtoDAsync_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream)
{
	return submit_copy(MPSD_COPY_IN, dstDevice, (CUdeviceptr)srcHost, ByteCount, hStream, false);
}

CUresult work_cuMemcpyDtoHAsync_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream)
{
	return submit_copy(MPSD_COPY_OUT, (CUdeviceptr)dstHost, srcDevice, ByteCount, hStream, false);
}

CUresult work_cuMemcpyDtoDAsync_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream)
{
	return submit_copy(MPSD_COPY_WITHIN, dstDevice, srcDevice, ByteCount, hStream, false);
}

CUresult work_cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount)
{
	return submit_copy(MPSD_COPY_ANY, dst, src, ByteCount, CU_STREAM_LEGACY, true);
}

CUresult work_cuMemcpyHtoD_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount)
{
	return submit_copy(MPSD_COPY_IN, dstDevice, (CUdeviceptr)srcHost, ByteCount, CU_STREAM_LEGACY, true);
}

CUresult work_cuMemcpyDtoD_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount)
{
	return submit_copy(MPSD_COPY_WITHIN, dstDevice, srcDevice, ByteCount, CU_STREAM_LEGACY, true);
}

/* The host's memory by its call, and the GPU's by its address. */
CUresult mpsd_copy_within(CUdeviceptr to, CUdeviceptr from, size_t size)
{
	return submit_copy(MPSD_COPY_ANY, to, from, size, CU_STREAM_LEGACY, true);
}

/* Memsets */

static CUresult submit_set(CUdeviceptr to, uint32_t value, size_t width, size_t count, CUstream stream, bool waits)
{
	struct mpsd_op op = {
		.kind = MPSD_OP_SET,
		.waits = waits,
		.stream = stream,
		.set = { .to = to, .value = value, .width = width, .count = count },
	};

	op.set.is_outside = count && !mpsd_is_device(to);
	return mpsd_submit_new(&op, false);
}

CUresult work_cuMemsetD8_v2(CUdeviceptr dstDevice, unsigned char uc, size_t N)
{
	return submit_set(dstDevice, uc, 1, N, CU_STREAM_LEGACY, true);
}

CUresult work_cuMemsetD16_v2(CUdeviceptr dstDevice, unsigned short us, size_t N)
{
	return submit_set(dstDevice, us, 2, N, CU_STREAM_LEGACY, true);
}

CUresult work_cuMemsetD32_v2(CUdeviceptr dstDevice, unsigned int ui, size_t N)
{
	return submit_set(dstDevice, ui, 4, N, CU_STREAM_LEGACY, true);
}

CUresult work_cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream)
{
	return submit_set(dstDevice, uc, 1, N, hStream, false);
}

CUresult work_cuMemsetD16Async(CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream)
{
	return submit_set(dstDevice, us, 2, N, hStream, false);
}

CUresult work_cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream)
{
	return submit_set(dstDevice, ui, 4, N, hStream, false);
}

/* Events */

CUresult work_cuEventRecord(CUevent hEvent, CUstream hStream)
{
	struct mpsd_op op = { .kind = MPSD_OP_RECORD, .stream = hStream, .event = { .event = hEvent } };

	return mpsd_submit_new(&op, false);
}

CUresult work_cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags)
{
	struct mpsd_op op = {
		.kind = MPSD_OP_RECORD,
		.stream = hStream,
		.event = { .event = hEvent, .flags = flags, .is_flagged = true },
	};

	return mpsd_submit_new(&op, false);
}

CUresult work_cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
	struct mpsd_op op = {
		.kind = MPSD_OP_WAIT,
		.stream = hStream,
		.event = { .event = hEvent, .flags = Flags },
	};

	return mpsd_submit_new(&op, false);
}

/* Memory: copies of the proxy's own give way to what the program asks for, then its standby, and then what others have. */

static CUresult free_put_off(const void *unused)
{
	(void)unused;
	return mpsd_memory_free_put_off() ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

#define MOST_TRIES 256

/* OUT_OF_MEMORY: there is no more. */
static CUresult more_room(struct mpsd_shortage *shortage)
{
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;

	if (mpsd_pools_have_free())
		result = mpsd_exact_without_work(mpsd_pools_give_back, NULL);
	if (result == CUDA_ERROR_OUT_OF_MEMORY && mpsd_exact() && mpsd_capture_has_put_off())
		result = mpsd_exact_without_work(free_put_off, NULL);
	if (result != CUDA_ERROR_OUT_OF_MEMORY)
		return result;
	if (mpsd_undo_has())
		return mpsd_in_order(mpsd_undo_give_back);
	if (mpsd_room_ask("its memory was needed") || mpsd_room_ask_others(shortage))
		return CUDA_SUCCESS;
	return CUDA_ERROR_OUT_OF_MEMORY;
}

bool mpsd_exact_has_more_room(CUresult *result, struct mpsd_shortage *shortage)
{
	/* Other threads and programs may take again what was given. */
	if (*result != CUDA_ERROR_OUT_OF_MEMORY || shortage->tries++ == MOST_TRIES)
		return false;
	*result = more_room(shortage);
	return *result == CUDA_SUCCESS;
}

CUresult make_cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
	struct mpsd_shortage shortage = { .bytes = bytesize };
	CUresult result;

	do
		result = mpsd_memory_alloc_inside(dptr, bytesize, MPSD_INSIDE_FIRST);
	while (mpsd_exact_has_more_room(&result, &shortage));
	/* Nobody has more; but the driver may, in pieces of its own, which cannot come along. */
	return result == CUDA_ERROR_OUT_OF_MEMORY ? inner_cuMemAlloc_v2(dptr, bytesize) : result;
}

/*
 * What a stale address among a kernel's parameters leads to is saved, and must not go before it is: so nobody submits
 * anything meanwhile.
 */
CUresult mpsd_exact_without_work(CUresult (*call)(const void *with), const void *with)
{
	uint64_t moves = mpsd_tables()->moves;
	bool has_order = mpsd_exact();
	CUresult result = CUDA_SUCCESS;

	if (has_order && !mpsd_order_take(moves))
		return MPSD_AGAIN;
	if (has_order)
		result = mpsd_epoch_settle();
	/* A function of the host, or a word, may wait for who wants the order, and the driver waits for that. */
	if (has_order && (mpsd_hosts_are_open() || mpsd_epoch_is_waiting())) {
		mpsd_order_give(moves);
		has_order = false;
	}
	if (result == CUDA_SUCCESS)
		result = call(with);
	if (has_order)
		mpsd_order_give(moves);
	return result;
}

static bool is_at_rest(void)
{
	bool is;

	if (mpsd_epoch_observed() != CUDA_SUCCESS || mpsd_hosts_are_open())
		return false;
	mpsd_word_take(&mpsd_exact_lock);
	is = !mpsd_is_left() && mpsd_lanes_all_proven() && !mpsd_epoch.operations;
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

bool mpsd_exact_at_rest(CUresult (*call)(const void *with), const void *with)
{
	uint64_t moves = mpsd_tables()->moves;
	bool has_order = mpsd_exact(), is;

	if (has_order && !mpsd_order_try(moves))
		return false;
	is = has_order ? is_at_rest() : mpsd_work_is_over();
	if (is)
		call(with);
	if (has_order)
		mpsd_order_give(moves);
	return is;
}

static CUresult free_one(const void *address)
{
	return inner_cuMemFree_v2(mpsd_address(*(const CUdeviceptr *)address));
}

CUresult make_cuMemFree_v2(CUdeviceptr dptr)
{
	CUresult result;

	if (mpsd_pools_free(dptr, &result))
		return result;
	return mpsd_exact_without_work(free_one, &dptr);
}

CUresult make_cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
				 unsigned int ElementSizeBytes)
{
	return mpsd_memory_alloc_rows(make_cuMemAlloc_v2, dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
}
