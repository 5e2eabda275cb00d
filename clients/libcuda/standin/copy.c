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

/* From the first byte to the last: whoever copies rows is not told where the driver found no way. */
static size_t span(size_t size, size_t pitch, size_t rows, size_t plane, size_t planes)
{
	return (planes - 1) * plane + (rows - 1) * pitch + size;
}

static void copy(struct operation *operation)
{
	size_t size = operation->copy.size, rows = operation->copy.rows, planes = operation->copy.planes;
	size_t to_pitch = operation->copy.to_pitch, from_pitch = operation->copy.from_pitch;
	size_t to_plane = operation->copy.to_plane, from_plane = operation->copy.from_plane;
	const char *from;
	char *to;

	pthread_rwlock_rdlock(&gpu_memory);
	from = reach(operation->copy.from, span(size, from_pitch, rows, from_plane, planes), ACCESS_READ);
	to = from ? reach(operation->copy.to, span(size, to_pitch, rows, to_plane, planes), ACCESS_WRITE) : NULL;
	for (size_t plane = 0; to && plane < planes; plane++)
		for (size_t row = 0; row < rows; row++)
			memmove(to + plane * to_plane + row * to_pitch, from + plane * from_plane + row * from_pitch,
				size);
	pthread_rwlock_unlock(&gpu_memory);
}

static void set_row(void *to, uint32_t value, size_t width, size_t count)
{
	if (width == 1)
		memset(to, (int)value, count);
	for (size_t i = 0; width == 2 && i < count; i++)
		((uint16_t *)to)[i] = (uint16_t)value;
	/* A word that the host looks at meanwhile is there at once, after what came before it. */
	for (size_t i = 0; width == 4 && i < count; i++)
		__atomic_store_n((uint32_t *)to + i, value, __ATOMIC_RELEASE);
}

static void set(struct operation *operation)
{
	size_t size = operation->set.count * operation->set.width, rows = operation->set.rows;
	char *to;

	pthread_rwlock_rdlock(&gpu_memory);
	to = reach(operation->set.to, span(size, operation->set.pitch, rows, 0, 1), ACCESS_WRITE);
	for (size_t row = 0; to && row < rows; row++)
		set_row(to + row * operation->set.pitch, operation->set.value, operation->set.width,
			operation->set.count);
	pthread_rwlock_unlock(&gpu_memory);
}

enum side {
	HOST_SIDE = 0,
	DEVICE_SIDE = 1,
	ANY_SIDE = 2,
};

static bool is_devices(const void *address)
{
	return range_at((uintptr_t)address, RANGE_DEVICE, RANGE_OPENED) ||
	       range_at((uintptr_t)address, RANGE_MAPPED, RANGE_MAPPED);
}

static bool is_fit(const void *address, size_t size, enum side side, enum access access)
{
	if (side == ANY_SIDE && is_devices(address))
		side = DEVICE_SIDE;
	return side == DEVICE_SIDE ? may_access((uintptr_t)address, size, access) : address != NULL;
}

static bool is_pageable(const void *address, enum side side)
{
	return side != DEVICE_SIDE && !range_at((uintptr_t)address, RANGE_HOST, RANGE_REGISTERED) &&
	       !(side == ANY_SIDE && is_devices(address));
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
		.run = copy, .type = CU_GRAPH_NODE_TYPE_MEMCPY,
		.copy = { .to = to, .from = from, .size = size, .rows = 1, .planes = 1 },
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
	CUresult result = transfer((void *)dstDevice, DEVICE_SIDE, srcHost, HOST_SIDE, ByteCount, NULL, true);

	gate_keep(GATE_WRITE);
	return result;
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
	CUresult result = transfer((void *)dstDevice, DEVICE_SIDE, (void *)srcDevice, DEVICE_SIDE, ByteCount, hStream,
				   false);

	gate_keep(GATE_COPIED);
	return result;
}

API CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream)
{
	return transfer((void *)dst, ANY_SIDE, (void *)src, ANY_SIDE, ByteCount, hStream, false);
}

/* What one side of a copy of rows is: as documented for cuMemcpy3D. */
struct plane {
	CUmemorytype type;
	const void *host;
	CUdeviceptr device;
	size_t x, y, z, pitch, height;
};

static bool find_side(const struct plane *given, const CUDA_MEMCPY3D *box, enum side *side, char **first,
		      size_t *pitch, size_t *plane)
{
	bool is_host = given->type == CU_MEMORYTYPE_HOST;

	if (!is_host && given->type != CU_MEMORYTYPE_DEVICE && given->type != CU_MEMORYTYPE_UNIFIED)
		return false;
	*side = is_host ? HOST_SIDE : given->type == CU_MEMORYTYPE_DEVICE ? DEVICE_SIDE : ANY_SIDE;
	*first = is_host ? (char *)given->host : (char *)given->device;
	*pitch = given->pitch ? given->pitch : box->WidthInBytes;
	if (!*first || (given->pitch && given->pitch < given->x + box->WidthInBytes))
		return false;
	if (box->Depth > 1 && given->height < given->y + box->Height)
		return false;
	*plane = *pitch * given->height;
	*first += given->z * *plane + given->y * *pitch + given->x;
	return true;
}

CUresult prepare_box(const CUDA_MEMCPY3D *box, struct operation *operation, bool *wait)
{
	const struct plane target = { box->dstMemoryType, box->dstHost, box->dstDevice, box->dstXInBytes, box->dstY,
				      box->dstZ, box->dstPitch, box->dstHeight };
	const struct plane source = { box->srcMemoryType, box->srcHost, box->srcDevice, box->srcXInBytes, box->srcY,
				      box->srcZ, box->srcPitch, box->srcHeight };
	enum side to_side, from_side;
	char *to, *from;

	*operation = (struct operation){
		.run = copy, .type = CU_GRAPH_NODE_TYPE_MEMCPY,
		.copy = { .size = box->WidthInBytes, .rows = box->Height, .planes = box->Depth },
	};
	if (!find_side(&target, box, &to_side, &to, &operation->copy.to_pitch, &operation->copy.to_plane) ||
	    !find_side(&source, box, &from_side, &from, &operation->copy.from_pitch, &operation->copy.from_plane))
		return CUDA_ERROR_INVALID_VALUE;
	operation->copy.to = to;
	operation->copy.from = from;
	if (!box->WidthInBytes || !box->Height || !box->Depth)
		return CUDA_SUCCESS;
	if (!is_fit(to, span(box->WidthInBytes, operation->copy.to_pitch, box->Height, operation->copy.to_plane,
			     box->Depth), to_side, ACCESS_WRITE) ||
	    !is_fit(from, span(box->WidthInBytes, operation->copy.from_pitch, box->Height, operation->copy.from_plane,
			       box->Depth), from_side, ACCESS_READ))
		return CUDA_ERROR_INVALID_VALUE;
	*wait = *wait || is_pageable(to, to_side) || is_pageable(from, from_side);
	return CUDA_SUCCESS;
}

CUresult transfer_box(const CUDA_MEMCPY3D *box, CUstream stream, bool wait)
{
	struct operation operation;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	result = leave(prepare_box(box, &operation, &wait));
	if (result != CUDA_SUCCESS || !box->WidthInBytes || !box->Height || !box->Depth)
		return result;
	return give(stream, &operation, wait);
}

CUresult prepare_rows(CUdeviceptr to, size_t pitch, uint32_t value, size_t width, size_t count, size_t rows,
		      struct operation *operation)
{
	*operation = (struct operation){
		.run = set, .type = CU_GRAPH_NODE_TYPE_MEMSET,
		.set = { .to = (void *)to, .value = value, .width = width, .count = count, .pitch = pitch,
			 .rows = rows },
	};
	if (!width || to % width || (rows > 1 && (pitch % width || pitch < width * count)) ||
	    !may_access(to, span(width * count, pitch, rows, 0, 1), ACCESS_WRITE))
		return CUDA_ERROR_INVALID_VALUE;
	return CUDA_SUCCESS;
}

CUresult fill_rows(CUdeviceptr to, size_t pitch, uint32_t value, size_t width, size_t count, size_t rows,
		   CUstream stream, bool wait)
{
	struct operation operation;
	CUcontext context;
	CUresult result;

	if (!count || !rows)
		return CUDA_SUCCESS;
	result = enter(&context);
	if (result != CUDA_SUCCESS)
		return result;
	result = leave(prepare_rows(to, pitch, value, width, count, rows, &operation));
	return result == CUDA_SUCCESS ? give(stream, &operation, wait) : result;
}

static CUresult fill(CUdeviceptr to, uint32_t value, size_t width, size_t count, CUstream stream, bool wait)
{
	return fill_rows(to, 0, value, width, count, 1, stream, wait);
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
