// SPDX-License-Identifier: MIT
/* Memory operations in streams. One that waits keeps its stream, as on a GPU, until the word is there or the context lost. */
#include <string.h>

#include "standin.h"

#define LOOK_NS 200000
#define MOST 8

static bool is_wait(const CUstreamBatchMemOpParams *one)
{
	return one->operation == CU_STREAM_MEM_OP_WAIT_VALUE_32 || one->operation == CU_STREAM_MEM_OP_WAIT_VALUE_64;
}

static size_t width(const CUstreamBatchMemOpParams *one)
{
	return one->operation == CU_STREAM_MEM_OP_WAIT_VALUE_32 ||
		       one->operation == CU_STREAM_MEM_OP_WRITE_VALUE_32
		       ? 4
		       : 8;
}

/* Under gpu_memory, without the lock. NULL: there is no way any more, which is a fault. */
static void *reach(const CUstreamBatchMemOpParams *one)
{
	uintptr_t at = one->writeValue.address;
	void *pointer;

	pthread_mutex_lock(&gpu_lock);
	pointer = may_access(at, width(one), is_wait(one) ? ACCESS_READ : ACCESS_WRITE) ? gpu_pointer(at) : NULL;
	if (!pointer)
		kill_context(working_for, CUDA_ERROR_ILLEGAL_ADDRESS);
	pthread_mutex_unlock(&gpu_lock);
	return pointer;
}

static void write_word(const CUstreamBatchMemOpParams *one)
{
	void *pointer;

	pthread_rwlock_rdlock(&gpu_memory);
	pointer = reach(one);
	if (pointer && width(one) == 4)
		__atomic_store_n((uint32_t *)pointer, one->writeValue.value, __ATOMIC_RELEASE);
	else if (pointer)
		__atomic_store_n((uint64_t *)pointer, one->writeValue.value64, __ATOMIC_RELEASE);
	pthread_rwlock_unlock(&gpu_memory);
}

static bool holds(uint64_t word, uint64_t value, unsigned int flags, size_t size)
{
	switch (flags & 3) {
	case CU_STREAM_WAIT_VALUE_GEQ:
		return size == 4 ? (int32_t)(word - value) >= 0 : (int64_t)(word - value) >= 0;
	case CU_STREAM_WAIT_VALUE_EQ:
		return word == value;
	case CU_STREAM_WAIT_VALUE_AND:
		return word & value;
	default:
		return ~(word | value) & (size == 4 ? UINT32_MAX : UINT64_MAX);
	}
}

/* Whether there is nothing more to wait for. */
static bool is_there(const CUstreamBatchMemOpParams *one)
{
	bool is = true;
	void *pointer;

	pthread_rwlock_rdlock(&gpu_memory);
	pointer = reach(one);
	if (pointer && width(one) == 4)
		is = holds(__atomic_load_n((uint32_t *)pointer, __ATOMIC_ACQUIRE), one->waitValue.value,
			   one->waitValue.flags, 4);
	else if (pointer)
		is = holds(__atomic_load_n((uint64_t *)pointer, __ATOMIC_ACQUIRE), one->waitValue.value64,
			   one->waitValue.flags, 8);
	pthread_rwlock_unlock(&gpu_memory);
	return is;
}

static bool is_lost(void)
{
	bool is;

	pthread_mutex_lock(&gpu_lock);
	/* A GPU that stands still goes on with the wait, if the context lives. */
	await_news(working_for);
	is = working_for->broken;
	if (!is)
		wait_a_moment(LOOK_NS);
	pthread_mutex_unlock(&gpu_lock);
	return is;
}

static void run(struct operation *operation)
{
	for (unsigned int i = 0; i < operation->memory.count; i++) {
		const CUstreamBatchMemOpParams *one = &operation->memory.each[i];

		if (one->operation == CU_STREAM_MEM_OP_BARRIER)
			continue;
		if (!is_wait(one))
			write_word(one);
		while (is_wait(one) && !is_there(one))
			if (is_lost())
				return;
	}
}

static bool is_fit(const CUstreamBatchMemOpParams *one)
{
	CUdeviceptr address = one->writeValue.address;

	if (one->operation == CU_STREAM_MEM_OP_BARRIER)
		return true;
	if (!is_wait(one) && one->operation != CU_STREAM_MEM_OP_WRITE_VALUE_32 &&
	    one->operation != CU_STREAM_MEM_OP_WRITE_VALUE_64)
		return false;
	return address % width(one) == 0 && may_access(address, width(one), is_wait(one) ? ACCESS_READ : ACCESS_WRITE);
}

/* What it is given is kept in the node. */
CUresult prepare_memops(const CUDA_BATCH_MEM_OP_NODE_PARAMS *given, struct operation *operation)
{
	*operation = (struct operation){ .run = run, .type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP };
	if (!given || !given->paramArray || !given->count || given->count > MOST || given->flags)
		return CUDA_ERROR_INVALID_VALUE;
	for (unsigned int i = 0; i < given->count; i++)
		if (!is_fit(&given->paramArray[i]))
			return CUDA_ERROR_INVALID_VALUE;
	memcpy(operation->memory.each, given->paramArray, given->count * sizeof(*given->paramArray));
	operation->memory.count = given->count;
	return CUDA_SUCCESS;
}

API CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned int count, CUstreamBatchMemOpParams *paramArray,
				   unsigned int flags)
{
	struct operation operation = { .run = run, .type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP };
	CUresult result;

	if (!paramArray || !count || count > MOST || flags)
		return CUDA_ERROR_INVALID_VALUE;
	result = enter_stream(stream, &stream);
	if (result != CUDA_SUCCESS)
		return result;
	for (unsigned int i = 0; i < count; i++)
		if (!is_fit(&paramArray[i]))
			return leave(CUDA_ERROR_INVALID_VALUE);
	memcpy(operation.memory.each, paramArray, count * sizeof(*paramArray));
	operation.memory.count = count;
	return leave(submit(stream, &operation));
}

static CUresult one(CUstream stream, CUstreamBatchMemOpType operation, CUdeviceptr address, cuuint64_t value,
		    unsigned int flags)
{
	CUstreamBatchMemOpParams given = {
		.writeValue = { .operation = operation, .address = address, .value64 = value, .flags = flags },
	};

	return cuStreamBatchMemOp_v2(stream, 1, &given, 0);
}

API CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)
{
	return one(stream, CU_STREAM_MEM_OP_WAIT_VALUE_32, addr, value, flags);
}

API CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)
{
	return one(stream, CU_STREAM_MEM_OP_WAIT_VALUE_64, addr, value, flags);
}

API CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr addr, cuuint32_t value, unsigned int flags)
{
	return one(stream, CU_STREAM_MEM_OP_WRITE_VALUE_32, addr, value, flags);
}

API CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags)
{
	return one(stream, CU_STREAM_MEM_OP_WRITE_VALUE_64, addr, value, flags);
}
