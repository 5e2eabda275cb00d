// SPDX-License-Identifier: MIT
/*
 * Copies and memsets. All go through a stream; the synchronous ones wait. A copy from pageable host
 * memory is taken before the call returns, as with the real driver, by waiting.
 */
#include <stdlib.h>
#include <string.h>

#include "standin.h"

/*
 * The way to what was looked at when the call was made. Mapped memory may have been taken away since then: the
 * copy engine's fault. The lock is not held, gpu_memory is.
 */
static void *reach(const void *address, size_t size, enum access access)
{
	uintptr_t at = (uintptr_t)address;
	void *pointer;

	pthread_mutex_lock(&gpu_lock);
	pointer = gpu_pointer(at);
	if (pointer != address && !may_access(at, size, access)) {
		kill_context(working_for, CUDA_ERROR_ILLEGAL_ADDRESS);
		pointer = NULL;
	}
	pthread_mutex_unlock(&gpu_lock);
	return pointer;
}

static void copy(struct operation *operation)
{
	size_t size = operation->copy.size, last = operation->copy.rows - 1;
	size_t to_pitch = operation->copy.to_pitch, from_pitch = operation->copy.from_pitch;
	const char *from;
	char *to;

	pthread_rwlock_rdlock(&gpu_memory);
	from = reach(operation->copy.from, last * from_pitch + size, ACCESS_READ);
	to = from ? reach(operation->copy.to, last * to_pitch + size, ACCESS_WRITE) : NULL;
	for (size_t row = 0; to && row <= last; row++)
		memmove(to + row * to_pitch, from + row * from_pitch, size);
	pthread_rwlock_unlock(&gpu_memory);
}

static void set(struct operation *operation)
{
	size_t count = operation->set.count, width = operation->set.width;
	uint32_t value = operation->set.value;
	void *to;

	pthread_rwlock_rdlock(&gpu_memory);
	to = reach(operation->set.to, count * width, ACCESS_WRITE);
	if (to && width == 1)
		memset(to, (int)value, count);
	for (size_t i = 0; to && width == 2 && i < count; i++)
		((uint16_t *)to)[i] = (uint16_t)value;
	/* A word that the host looks at meanwhile is there at once, after what came before it. */
	for (size_t i = 0; to && width == 4 && i < count; i++)
		__atomic_store_n((uint32_t *)to + i, value, __ATOMIC_RELEASE);
	pthread_rwlock_unlock(&gpu_memory);
}

enum side {
	HOST_SIDE = 0,
	DEVICE_SIDE = 1,
	ANY_SIDE = 2,
};

static bool is_fit(const void *address, size_t size, enum side side, enum access access)
{
	if (side == ANY_SIDE && (range_at((uintptr_t)address, RANGE_DEVICE, RANGE_OPENED) ||
				 range_at((uintptr_t)address, RANGE_MAPPED, RANGE_MAPPED)))
		side = DEVICE_SIDE;
	return side == DEVICE_SIDE ? may_access((uintptr_t)address, size, access) : address != NULL;
}

static bool is_pageable(const void *address, enum side side)
{
	return side == HOST_SIDE && !range_at((uintptr_t)address, RANGE_HOST, RANGE_REGISTERED);
}

static CUresult give(CUstream handle, const struct operation *operation, bool wait)
{
	struct CUstream_st *stream;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	result = find_stream(context, handle, &stream);
	if (result != CUDA_SUCCESS)
		return leave(result);
	result = submit(stream, operation);
	if (result == CUDA_SUCCESS && wait && !stream->capture)
		result = wait_for(context, (struct moment){ stream, stream->submitted });
	return leave(result);
}

static CUresult transfer(void *to, enum side to_side, const void *from, enum side from_side, size_t size,
			 CUstream stream, bool wait)
{
	struct operation operation = {
		.run = copy,
		.copy = { .to = to, .from = from, .size = size, .rows = 1 },
	};
	CUcontext context;
	CUresult result;

	if (!size)
		return CUDA_SUCCESS;
	result = enter(&context);
	if (result != CUDA_SUCCESS)
		return result;
	if (!is_fit(to, size, to_side, ACCESS_WRITE) || !is_fit(from, size, from_side, ACCESS_READ))
		return leave(CUDA_ERROR_INVALID_VALUE);
	wait = wait || is_pageable(to, to_side) || is_pageable(from, from_side);
	leave(CUDA_SUCCESS);
	return give(stream, &operation, wait);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount)
{
	return transfer((void *)dstDevice, DEVICE_SIDE, srcHost, HOST_SIDE, ByteCount, NULL, true);
}

API CUresult cuMemcpyDtoH_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount)
{
	return transfer(dstHost, HOST_SIDE, (void *)srcDevice, DEVICE_SIDE, ByteCount, NULL, true);
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount)
{
	return transfer((void *)dstDevice, DEVICE_SIDE, (void *)srcDevice, DEVICE_SIDE, ByteCount, NULL, true);
}

API CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount)
{
	return transfer((void *)dst, ANY_SIDE, (void *)src, ANY_SIDE, ByteCount, NULL, true);
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream)
{
	return transfer((void *)dstDevice, DEVICE_SIDE, srcHost, HOST_SIDE, ByteCount, hStream, false);
}

API CUresult cuMemcpyDtoHAsync_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream)
{
	return transfer(dstHost, HOST_SIDE, (void *)srcDevice, DEVICE_SIDE, ByteCount, hStream, false);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount,
				  CUstream hStream)
{
	return transfer((void *)dstDevice, DEVICE_SIDE, (void *)srcDevice, DEVICE_SIDE, ByteCount, hStream, false);
}

API CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream)
{
	return transfer((void *)dst, ANY_SIDE, (void *)src, ANY_SIDE, ByteCount, hStream, false);
}

static char *plane(CUmemorytype type, const void *host, CUdeviceptr device, size_t x, size_t y, size_t pitch)
{
	char *base = type == CU_MEMORYTYPE_HOST ? (char *)host : (char *)device;

	return base ? base + y * pitch + x : NULL;
}

static CUresult transfer_2d(const CUDA_MEMCPY2D *p, CUstream stream, bool wait)
{
	struct operation operation = { .run = copy };
	CUcontext context;
	CUresult result;

	if (!p || p->srcMemoryType == CU_MEMORYTYPE_ARRAY || p->dstMemoryType == CU_MEMORYTYPE_ARRAY)
		return CUDA_ERROR_INVALID_VALUE;
	if (!p->Height || !p->WidthInBytes)
		return CUDA_SUCCESS;
	operation.copy.size = p->WidthInBytes;
	operation.copy.rows = p->Height;
	operation.copy.to_pitch = p->dstPitch ? p->dstPitch : p->WidthInBytes;
	operation.copy.from_pitch = p->srcPitch ? p->srcPitch : p->WidthInBytes;
	operation.copy.to = plane(p->dstMemoryType, p->dstHost, p->dstDevice, p->dstXInBytes, p->dstY,
				  operation.copy.to_pitch);
	operation.copy.from = plane(p->srcMemoryType, p->srcHost, p->srcDevice, p->srcXInBytes, p->srcY,
				    operation.copy.from_pitch);
	result = enter(&context);
	if (result != CUDA_SUCCESS)
		return result;
	if (operation.copy.to_pitch < p->WidthInBytes || operation.copy.from_pitch < p->WidthInBytes ||
	    !is_fit(operation.copy.to, (p->Height - 1) * operation.copy.to_pitch + p->WidthInBytes,
		    p->dstMemoryType == CU_MEMORYTYPE_DEVICE ? DEVICE_SIDE : ANY_SIDE, ACCESS_WRITE) ||
	    !is_fit(operation.copy.from, (p->Height - 1) * operation.copy.from_pitch + p->WidthInBytes,
		    p->srcMemoryType == CU_MEMORYTYPE_DEVICE ? DEVICE_SIDE : ANY_SIDE, ACCESS_READ))
		return leave(CUDA_ERROR_INVALID_VALUE);
	leave(CUDA_SUCCESS);
	return give(stream, &operation, wait);
}

API CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *pCopy)
{
	return transfer_2d(pCopy, NULL, true);
}

API CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *pCopy)
{
	return transfer_2d(pCopy, NULL, true);
}

API CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *pCopy, CUstream hStream)
{
	return transfer_2d(pCopy, hStream, false);
}

static CUresult fill(CUdeviceptr to, uint32_t value, size_t width, size_t count, CUstream stream, bool wait)
{
	struct operation operation = {
		.run = set,
		.set = { .to = (void *)to, .value = value, .width = width, .count = count },
	};
	CUcontext context;
	CUresult result;

	if (!count)
		return CUDA_SUCCESS;
	result = enter(&context);
	if (result != CUDA_SUCCESS)
		return result;
	if (to % width || !may_access(to, width * count, ACCESS_WRITE))
		return leave(CUDA_ERROR_INVALID_VALUE);
	leave(CUDA_SUCCESS);
	return give(stream, &operation, wait);
}

API CUresult cuMemsetD8_v2(CUdeviceptr dstDevice, unsigned char uc, size_t N)
{
	return fill(dstDevice, uc, 1, N, NULL, true);
}

API CUresult cuMemsetD16_v2(CUdeviceptr dstDevice, unsigned short us, size_t N)
{
	return fill(dstDevice, us, 2, N, NULL, true);
}

API CUresult cuMemsetD32_v2(CUdeviceptr dstDevice, unsigned int ui, size_t N)
{
	return fill(dstDevice, ui, 4, N, NULL, true);
}

API CUresult cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream)
{
	return fill(dstDevice, uc, 1, N, hStream, false);
}

API CUresult cuMemsetD16Async(CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream)
{
	return fill(dstDevice, us, 2, N, hStream, false);
}

API CUresult cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream)
{
	return fill(dstDevice, ui, 4, N, hStream, false);
}
