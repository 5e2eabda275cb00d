// SPDX-License-Identifier: MIT
/*
 * Memory operations in streams: a word that is written, or waited for. What is written into the window is undone and done
 * again like a memset. Where it goes to the host's memory somebody may have seen it, and what is waited for somebody else
 * writes, in an order that is known to him: an epoch with one of those is not done again.
 */
#include <stdlib.h>
#include <string.h>

#include "exact/state.h"
#include "exact/still.h"
#include "exact/undo.h"
#include "failover/graph.h"
#include "failover/line.h"

struct mpsd_memops {
	bool is_batch;
	unsigned int count, flags;
	CUstreamBatchMemOpParams each[];
};

static bool is_known(const CUstreamBatchMemOpParams *one)
{
	switch ((int)one->operation) {
	case CU_STREAM_MEM_OP_WAIT_VALUE_32:
	case CU_STREAM_MEM_OP_WAIT_VALUE_64:
	case CU_STREAM_MEM_OP_WRITE_VALUE_32:
	case CU_STREAM_MEM_OP_WRITE_VALUE_64:
	case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
	case CU_STREAM_MEM_OP_BARRIER:
		return true;
	default:
		return false;
	}
}

static bool are_known(const CUstreamBatchMemOpParams *each, unsigned int count)
{
	for (unsigned int i = 0; i < count; i++)
		if (!is_known(&each[i]))
			return false;
	return true;
}

static bool is_wait(const CUstreamBatchMemOpParams *one)
{
	return one->operation == CU_STREAM_MEM_OP_WAIT_VALUE_32 || one->operation == CU_STREAM_MEM_OP_WAIT_VALUE_64;
}

static bool is_write(const CUstreamBatchMemOpParams *one)
{
	return one->operation == CU_STREAM_MEM_OP_WRITE_VALUE_32 || one->operation == CU_STREAM_MEM_OP_WRITE_VALUE_64;
}

bool mpsd_memops_wait(const struct mpsd_memops *ops)
{
	for (unsigned int i = 0; i < ops->count; i++)
		if (is_wait(&ops->each[i]))
			return true;
	return false;
}

/*
 * What is done again is done one after the other: a kernel in another stream that goes on when it sees the word would then
 * come first, and never end.
 */
static bool others_are_open(const struct mpsd_lane *lane)
{
	bool are;

	mpsd_word_take(&mpsd_exact_lock);
	are = mpsd_lanes_others_are_open(lane);
	mpsd_word_give(&mpsd_exact_lock);
	return are;
}

CUresult mpsd_memops_save(const struct mpsd_memops *ops, struct mpsd_plan *plan)
{
	CUresult result = CUDA_SUCCESS;

	for (unsigned int i = 0; i < ops->count && result == CUDA_SUCCESS; i++) {
		const CUstreamBatchMemOpParams *one = &ops->each[i];

		if (is_write(one))
			mpsd_still_written(one->writeValue.address, sizeof(cuuint64_t));
		if (is_wait(one))
			mpsd_epoch_unsure("a stream wait for a memory value");
		else if (is_write(one) && !mpsd_is_device(one->writeValue.address))
			mpsd_epoch_unsure("a stream memory write outside the window");
		else if (is_write(one) && others_are_open(plan->lane))
			mpsd_epoch_unsure("a stream memory write while another stream works");
		else if (is_write(one))
			result = mpsd_undo_save(plan, one->writeValue.address,
						one->operation == CU_STREAM_MEM_OP_WRITE_VALUE_32 ? 4 : 8);
	}
	return result;
}

static CUresult give_one(CUstream stream, const CUstreamBatchMemOpParams *one)
{
	CUdeviceptr address = one->writeValue.address;
	unsigned int flags = one->writeValue.flags;

	switch (one->operation) {
	case CU_STREAM_MEM_OP_WAIT_VALUE_32:
		return inner_cuStreamWaitValue32_v2(stream, address, one->waitValue.value, flags);
	case CU_STREAM_MEM_OP_WAIT_VALUE_64:
		return inner_cuStreamWaitValue64_v2(stream, address, one->waitValue.value64, flags);
	case CU_STREAM_MEM_OP_WRITE_VALUE_32:
		return inner_cuStreamWriteValue32_v2(stream, address, one->writeValue.value, flags);
	default:
		return inner_cuStreamWriteValue64_v2(stream, address, one->writeValue.value64, flags);
	}
}

/* By the names of the copy of this call. NULL: no memory. */
static CUstreamBatchMemOpParams *native_of(const CUstreamBatchMemOpParams *each, unsigned int count)
{
	CUstreamBatchMemOpParams *native = malloc((count + 1) * sizeof(*native));

	if (!native)
		return NULL;
	memcpy(native, each, count * sizeof(*native));
	/* Both kinds have it at the same place. */
	for (unsigned int i = 0; i < count; i++)
		if (is_wait(&each[i]) || is_write(&each[i]))
			native[i].writeValue.address = mpsd_address(each[i].writeValue.address);
	return native;
}

static CUresult give(CUstream stream, const CUstreamBatchMemOpParams *each, unsigned int count, unsigned int flags)
{
	CUstreamBatchMemOpParams *native = native_of(each, count);
	CUresult result;

	if (!native)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = inner_cuStreamBatchMemOp_v2(stream, count, native, flags);
	free(native);
	return result;
}

CUresult mpsd_memops_issue(const struct mpsd_memops *ops, CUstream stream)
{
	CUstreamBatchMemOpParams one;

	if (ops->is_batch)
		return give(stream, ops->each, ops->count, ops->flags);
	one = ops->each[0];
	one.writeValue.address = mpsd_address(one.writeValue.address);
	return give_one(stream, &one);
}

/* Or waited for: of a module's variable neither goes along. */
static void all_written(const CUstreamBatchMemOpParams *each, unsigned int count)
{
	for (unsigned int i = 0; i < count; i++)
		if (is_wait(&each[i]) || is_write(&each[i]))
			mpsd_written(each[i].writeValue.address);
}

/* NULL: no memory. */
static struct mpsd_op *new_op(bool is_batch, const CUstreamBatchMemOpParams *each, unsigned int count, unsigned int flags)
{
	struct mpsd_memops *ops = malloc(sizeof(*ops) + count * sizeof(*each));
	struct mpsd_op *op = calloc(1, sizeof(*op));

	if (!op || !ops) {
		free(op);
		free(ops);
		return NULL;
	}
	*ops = (struct mpsd_memops){ is_batch, count, flags };
	memcpy(ops->each, each, count * sizeof(*each));
	op->kind = MPSD_OP_MEMORY;
	op->memory = ops;
	return op;
}

static CUresult submit(CUstream stream, bool is_batch, const CUstreamBatchMemOpParams *each, unsigned int count,
		       unsigned int flags)
{
	struct mpsd_op *op = new_op(is_batch, each, count, flags);

	if (!op)
		return CUDA_ERROR_OUT_OF_MEMORY;
	op->stream = stream;
	return mpsd_submit(op, false);
}

struct mpsd_op *mpsd_memops_of_node(const CUDA_BATCH_MEM_OP_NODE_PARAMS *given)
{
	if (!given->paramArray || !given->count || !are_known(given->paramArray, given->count))
		return NULL;
	all_written(given->paramArray, given->count);
	return new_op(true, given->paramArray, given->count, given->flags);
}

CUDA_BATCH_MEM_OP_NODE_PARAMS mpsd_memops_native(const struct mpsd_memops *ops, CUcontext context)
{
	return (CUDA_BATCH_MEM_OP_NODE_PARAMS){ mpsd_native(context), ops->count, native_of(ops->each, ops->count),
						ops->flags };
}

static CUresult make(CUstream stream, CUstreamBatchMemOpParams one)
{
	mpsd_written(one.writeValue.address);
	one.writeValue.address = mpsd_address(one.writeValue.address);
	return give_one(mpsd_native(stream), &one);
}

static CUresult work(CUstream stream, CUstreamBatchMemOpParams one)
{
	mpsd_written(one.writeValue.address);
	return submit(stream, false, &one, 1, 0);
}

/* Both kinds have all of it at the same places. */
static CUstreamBatchMemOpParams one_of(CUstreamBatchMemOpType operation, CUdeviceptr address, cuuint64_t value,
				       unsigned int flags)
{
	return (CUstreamBatchMemOpParams){
		.writeValue = { .operation = operation, .address = address, .value64 = value, .flags = flags },
	};
}

#define ONE(name, type, operation)									\
	CUresult make_##name(CUstream stream, CUdeviceptr addr, type value, unsigned int flags)		\
	{												\
		return make(stream, one_of(operation, addr, value, flags));				\
	}												\
													\
	CUresult work_##name(CUstream stream, CUdeviceptr addr, type value, unsigned int flags)		\
	{												\
		return work(stream, one_of(operation, addr, value, flags));				\
	}

ONE(cuStreamWaitValue32_v2, cuuint32_t, CU_STREAM_MEM_OP_WAIT_VALUE_32)
ONE(cuStreamWaitValue64_v2, cuuint64_t, CU_STREAM_MEM_OP_WAIT_VALUE_64)
ONE(cuStreamWriteValue32_v2, cuuint32_t, CU_STREAM_MEM_OP_WRITE_VALUE_32)
ONE(cuStreamWriteValue64_v2, cuuint64_t, CU_STREAM_MEM_OP_WRITE_VALUE_64)

CUresult make_cuStreamBatchMemOp_v2(CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray,
				    unsigned int flags)
{
	CUresult result;

	if (!paramArray || !count)
		return inner_cuStreamBatchMemOp_v2(mpsd_native(stream), count, paramArray, flags);
	all_written(paramArray, count);
	result = give(mpsd_native(stream), paramArray, count, flags);
	return are_known(paramArray, count) ? result : mpsd_line_made(result, "a stream memory operation of an unknown type");
}

CUresult work_cuStreamBatchMemOp_v2(CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray,
				    unsigned int flags)
{
	if (!paramArray || !count || !are_known(paramArray, count))
		return make_cuStreamBatchMemOp_v2(stream, count, paramArray, flags);
	all_written(paramArray, count);
	return submit(stream, true, paramArray, count, flags);
}
