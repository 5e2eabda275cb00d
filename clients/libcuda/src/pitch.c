// SPDX-License-Identifier: MIT
/* cuMemAllocPitch in a window. The pitch is that of today's GPUs: a multiple of 512 bytes. */
#include <stdint.h>

#include "memory.h"
#include "proxy.h"

#define PITCH_ALIGNMENT ((size_t)512)

CUresult mpsd_memory_alloc_rows(CUresult (*alloc)(CUdeviceptr *dptr, size_t size), CUdeviceptr *dptr, size_t *pPitch,
				size_t WidthInBytes, size_t Height, unsigned int ElementSizeBytes)
{
	size_t pitch = (WidthInBytes + PITCH_ALIGNMENT - 1) / PITCH_ALIGNMENT * PITCH_ALIGNMENT;
	CUresult result;

	if (!dptr || !pPitch || !WidthInBytes || !Height || pitch < WidthInBytes || pitch > SIZE_MAX / Height ||
	    (ElementSizeBytes != 4 && ElementSizeBytes != 8 && ElementSizeBytes != 16))
		return real_cuMemAllocPitch_v2(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
	result = alloc(dptr, pitch * Height);
	if (result == CUDA_SUCCESS)
		*pPitch = pitch;
	return result;
}

CUresult wrap_cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
				 unsigned int ElementSizeBytes)
{
	return mpsd_memory_alloc_rows(wrap_cuMemAlloc_v2, dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
}
