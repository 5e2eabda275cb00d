// SPDX-License-Identifier: MIT
/* The calls that copy rows and planes, and set rows. */
#include "standin.h"

static CUresult transfer_2d(const CUDA_MEMCPY2D *given, CUstream stream, bool wait)
{
	CUDA_MEMCPY3D box;

	if (!given)
		return CUDA_ERROR_INVALID_VALUE;
	box = (CUDA_MEMCPY3D){
		.srcXInBytes = given->srcXInBytes, .srcY = given->srcY, .srcMemoryType = given->srcMemoryType,
		.srcHost = given->srcHost, .srcDevice = given->srcDevice, .srcPitch = given->srcPitch,
		.dstXInBytes = given->dstXInBytes, .dstY = given->dstY, .dstMemoryType = given->dstMemoryType,
		.dstHost = given->dstHost, .dstDevice = given->dstDevice, .dstPitch = given->dstPitch,
		.WidthInBytes = given->WidthInBytes, .Height = given->Height, .Depth = 1,
	};
	return transfer_box(&box, stream, wait);
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

API CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D *pCopy)
{
	return pCopy ? transfer_box(pCopy, NULL, true) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *pCopy, CUstream hStream)
{
	return pCopy ? transfer_box(pCopy, hStream, false) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemsetD2D8_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height)
{
	return fill_rows(dstDevice, dstPitch, uc, 1, Width, Height, NULL, true);
}

API CUresult cuMemsetD2D16_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width, size_t Height)
{
	return fill_rows(dstDevice, dstPitch, us, 2, Width, Height, NULL, true);
}

API CUresult cuMemsetD2D32_v2(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height)
{
	return fill_rows(dstDevice, dstPitch, ui, 4, Width, Height, NULL, true);
}

API CUresult cuMemsetD2D8Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned char uc, size_t Width, size_t Height,
			       CUstream hStream)
{
	return fill_rows(dstDevice, dstPitch, uc, 1, Width, Height, hStream, false);
}

API CUresult cuMemsetD2D16Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned short us, size_t Width,
				size_t Height, CUstream hStream)
{
	return fill_rows(dstDevice, dstPitch, us, 2, Width, Height, hStream, false);
}

API CUresult cuMemsetD2D32Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height,
				CUstream hStream)
{
	return fill_rows(dstDevice, dstPitch, ui, 4, Width, Height, hStream, false);
}
