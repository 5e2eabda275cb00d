// SPDX-License-Identifier: MIT
/* Primary contexts: their beginning and their end, which is that of their memory. */
#include "memory.h"
#include "proxy.h"

CUresult wrap_cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
	CUresult result = real_cuDevicePrimaryCtxRetain(pctx, dev);

	if (result == CUDA_SUCCESS)
		mpsd_memory_begin(dev, *pctx);
	return result;
}

static CUresult after_end(CUresult result, CUdevice dev)
{
	if (result == CUDA_SUCCESS)
		mpsd_memory_end(dev);
	return result;
}

CUresult wrap_cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
	return after_end(real_cuDevicePrimaryCtxRelease_v2(dev), dev);
}

CUresult wrap_cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
	return after_end(real_cuDevicePrimaryCtxReset_v2(dev), dev);
}

#undef cuDevicePrimaryCtxRelease
CUresult wrap_cuDevicePrimaryCtxRelease(CUdevice dev)
{
	return after_end(real_cuDevicePrimaryCtxRelease(dev), dev);
}

#undef cuDevicePrimaryCtxReset
CUresult wrap_cuDevicePrimaryCtxReset(CUdevice dev)
{
	return after_end(real_cuDevicePrimaryCtxReset(dev), dev);
}

CUresult mpsd_memory_wait(CUcontext owner)
{
	CUresult result = real_cuCtxPushCurrent_v2(owner);

	if (result != CUDA_SUCCESS)
		return result;
	result = real_cuCtxSynchronize();
	real_cuCtxPopCurrent_v2(&owner);
	return result;
}
