// SPDX-License-Identifier: MIT
/*
 * Copies and memsets that the program waits for: past the end of an allocation the driver refuses them,
 * and of mapped memory it knows the end of the piece only. An allocation ends here with its last unit of
 * ARENA_UNIT bytes, not with the byte that was asked for: nobody is refused what the driver would do.
 *
 * And the waits of CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, for a driver that has none for mapped memory.
 */
#include "arena.h"
#include "hold.h"
#include "marks.h"
#include "memory.h"
#include "proxy.h"

enum verdict {
	FINE,
	FINE_AND_WAIT,
	PAST_THE_END,
};

static enum verdict look(CUdeviceptr address, size_t size)
{
	struct mpsd_allocation allocation;
	CUdeviceptr end;

	if (!size || !mpsd_memory_is_in_window(address) || mpsd_memory_is_held(address))
		return FINE;
	if (!mpsd_memory_find(address, &allocation))
		return PAST_THE_END;
	end = allocation.base + (allocation.size + ARENA_UNIT - 1) / ARENA_UNIT * ARENA_UNIT;
	if (size > end - address)
		return PAST_THE_END;
	return mpsd_mark_sync_memops(allocation.base) ? FINE_AND_WAIT : FINE;
}

/* What is wrong with the context is for the driver to say first. */
static bool is_refused(enum verdict one, enum verdict two)
{
	CUdevice device;

	return (one == PAST_THE_END || two == PAST_THE_END) && real_cuCtxGetDevice(&device) == CUDA_SUCCESS;
}

bool mpsd_bounds_refuse(CUdeviceptr address, size_t size)
{
	return is_refused(look(address, size), FINE);
}

static CUresult after(CUresult result, enum verdict one, enum verdict two)
{
	if (result == CUDA_SUCCESS && (one == FINE_AND_WAIT || two == FINE_AND_WAIT))
		return real_cuCtxSynchronize();
	return result;
}

CUresult wrap_cuMemcpyHtoD_v2(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount)
{
	enum verdict to = look(dstDevice, ByteCount);

	if (is_refused(to, FINE))
		return CUDA_ERROR_INVALID_VALUE;
	return after(real_cuMemcpyHtoD_v2(dstDevice, srcHost, ByteCount), to, FINE);
}

CUresult wrap_cuMemcpyDtoH_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount)
{
	enum verdict from = look(srcDevice, ByteCount);

	if (is_refused(from, FINE))
		return CUDA_ERROR_INVALID_VALUE;
	return after(real_cuMemcpyDtoH_v2(dstHost, srcDevice, ByteCount), from, FINE);
}

CUresult wrap_cuMemcpyDtoD_v2(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount)
{
	enum verdict to = look(dstDevice, ByteCount), from = look(srcDevice, ByteCount);

	if (is_refused(to, from))
		return CUDA_ERROR_INVALID_VALUE;
	return after(real_cuMemcpyDtoD_v2(dstDevice, srcDevice, ByteCount), to, from);
}

CUresult wrap_cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount)
{
	enum verdict to = look(dst, ByteCount), from = look(src, ByteCount);

	if (is_refused(to, from))
		return CUDA_ERROR_INVALID_VALUE;
	return after(real_cuMemcpy(dst, src, ByteCount), to, from);
}

CUresult wrap_cuMemcpyPeer(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice,
			   CUcontext srcContext, size_t ByteCount)
{
	enum verdict to = look(dstDevice, ByteCount), from = look(srcDevice, ByteCount);

	if (is_refused(to, from))
		return CUDA_ERROR_INVALID_VALUE;
	return after(real_cuMemcpyPeer(dstDevice, dstContext, srcDevice, srcContext, ByteCount), to, from);
}

/* Memsets: rows of `width` bytes. What overflows is for the driver. */
static enum verdict look_at_rows(CUdeviceptr address, size_t pitch, size_t width, size_t rows)
{
	size_t size;

	if (!rows || !width || __builtin_mul_overflow(pitch, rows - 1, &size) ||
	    __builtin_add_overflow(size, width, &size))
		return FINE;
	return look(address, size);
}

static enum verdict look_at_elements(CUdeviceptr address, size_t width, size_t count)
{
	return look_at_rows(address, width, width, count);
}

CUresult wrap_cuMemsetD8_v2(CUdeviceptr dstDevice, unsigned char uc, size_t N)
{
	enum verdict to = look_at_elements(dstDevice, 1, N);

	if (is_refused(to, FINE))
		return CUDA_ERROR_INVALID_VALUE;
	return after(real_cuMemsetD8_v2(dstDevice, uc, N), to, FINE);
}

CUresult wrap_cuMemsetD16_v2(CUdeviceptr dstDevice, unsigned short us, size_t N)
{
	enum verdict to = look_at_elements(dstDevice, 2, N);

	if (is_refused(to, FINE))
		return CUDA_ERROR_INVALID_VALUE;
	return after(real_cuMemsetD16_v2(dstDevice, us, N), to, FINE);
}

CUresult wrap_cuMemsetD32_v2(CUdeviceptr dstDevice, unsigned int ui, size_t N)
{
	enum verdict to = look_at_elements(dstDevice, 4, N);

	if (is_refused(to, FINE))
		return CUDA_ERROR_INVALID_VALUE;
	return after(real_cuMemsetD32_v2(dstDevice, ui, N), to, FINE);
}

CUresult wrap_cuMemsetD2D8_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width,
			      size_t Height)
{
	enum verdict to = look_at_rows(dstDevice, dstPitch, Width, Height);

	if (is_refused(to, FINE))
		return CUDA_ERROR_INVALID_VALUE;
	return after(real_cuMemsetD2D8_v2(dstDevice, dstPitch, uc, Width, Height), to, FINE);
}

CUresult wrap_cuMemsetD2D16_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width,
			       size_t Height)
{
	enum verdict to = look_at_rows(dstDevice, dstPitch, 2 * Width, Height);

	if (is_refused(to, FINE))
		return CUDA_ERROR_INVALID_VALUE;
	return after(real_cuMemsetD2D16_v2(dstDevice, dstPitch, us, Width, Height), to, FINE);
}

CUresult wrap_cuMemsetD2D32_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width,
			       size_t Height)
{
	enum verdict to = look_at_rows(dstDevice, dstPitch, 4 * Width, Height);

	if (is_refused(to, FINE))
		return CUDA_ERROR_INVALID_VALUE;
	return after(real_cuMemsetD2D32_v2(dstDevice, dstPitch, ui, Width, Height), to, FINE);
}

/* One side of a 2-D copy. Host memory and arrays have no bounds that are known here. */
static enum verdict look_at_plane(const CUDA_MEMCPY2D *copy, CUmemorytype type, CUdeviceptr address,
				  size_t pitch, size_t x, size_t y)
{
	size_t before;

	if (type != CU_MEMORYTYPE_DEVICE && type != CU_MEMORYTYPE_UNIFIED)
		return FINE;
	pitch = pitch ? pitch : copy->WidthInBytes;
	if (__builtin_mul_overflow(y, pitch, &before) || __builtin_add_overflow(before, x, &before))
		return FINE;
	return look_at_rows(address + before, pitch, copy->WidthInBytes, copy->Height);
}

static enum verdict look_at_target(const CUDA_MEMCPY2D *copy)
{
	return look_at_plane(copy, copy->dstMemoryType, copy->dstDevice, copy->dstPitch, copy->dstXInBytes,
			     copy->dstY);
}

static enum verdict look_at_source(const CUDA_MEMCPY2D *copy)
{
	return look_at_plane(copy, copy->srcMemoryType, copy->srcDevice, copy->srcPitch, copy->srcXInBytes,
			     copy->srcY);
}

CUresult wrap_cuMemcpy2D_v2(const CUDA_MEMCPY2D *pCopy)
{
	enum verdict to = pCopy ? look_at_target(pCopy) : FINE, from = pCopy ? look_at_source(pCopy) : FINE;

	if (is_refused(to, from))
		return CUDA_ERROR_INVALID_VALUE;
	return after(real_cuMemcpy2D_v2(pCopy), to, from);
}

CUresult wrap_cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *pCopy)
{
	enum verdict to = pCopy ? look_at_target(pCopy) : FINE, from = pCopy ? look_at_source(pCopy) : FINE;

	if (is_refused(to, from))
		return CUDA_ERROR_INVALID_VALUE;
	return after(real_cuMemcpy2DUnaligned_v2(pCopy), to, from);
}
