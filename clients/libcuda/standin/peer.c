// SPDX-License-Identifier: MIT
/* Peer access between the devices, all of which can, and copies from one to the other. */
#include "standin.h"

API CUresult cuDeviceCanAccessPeer(int *canAccessPeer, CUdevice dev, CUdevice peerDev)
{
	CUresult result = is_initialised();

	if (result != CUDA_SUCCESS)
		return result;
	if (!canAccessPeer)
		return CUDA_ERROR_INVALID_VALUE;
	if (!is_device(dev) || !is_device(peerDev))
		return CUDA_ERROR_INVALID_DEVICE;
	*canAccessPeer = dev != peerDev;
	return CUDA_SUCCESS;
}

static CUresult enter_pair(CUcontext other, CUcontext *context)
{
	CUresult result = enter(context);

	if (result != CUDA_SUCCESS)
		return result;
	for (int i = 0; i < device_count(); i++)
		if (other == primary_of(i) && other->retained && other != *context)
			return CUDA_SUCCESS;
	return leave(CUDA_ERROR_INVALID_CONTEXT);
}

API CUresult cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags)
{
	CUcontext context;
	CUresult result = enter_pair(peerContext, &context);

	if (result != CUDA_SUCCESS)
		return result;
	if (Flags)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (context->peers >> peerContext->device & 1)
		return leave(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
	context->peers |= 1u << peerContext->device;
	return leave(CUDA_SUCCESS);
}

API CUresult cuCtxDisablePeerAccess(CUcontext peerContext)
{
	CUcontext context;
	CUresult result = enter_pair(peerContext, &context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!(context->peers >> peerContext->device & 1))
		return leave(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
	context->peers &= ~(1u << peerContext->device);
	return leave(CUDA_SUCCESS);
}

/* Whatever their devices are, they share one lot of memory. */
static CUresult check_pair(CUcontext one, CUcontext other, bool wait)
{
	bool is_one = false, is_other = false;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	for (int i = 0; i < device_count(); i++) {
		is_one |= one == primary_of(i) && one->retained;
		is_other |= other == primary_of(i) && other->retained;
	}
	if (!is_one || !is_other)
		return leave(CUDA_ERROR_INVALID_CONTEXT);
	/* After all that is in flight there, in whatever streams. */
	if (wait)
		result = wait_for_all(one);
	if (wait && result == CUDA_SUCCESS)
		result = wait_for_all(other);
	return leave(result);
}

API CUresult cuMemcpyPeer(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext,
			  size_t ByteCount)
{
	CUresult result = check_pair(dstContext, srcContext, true);

	return result == CUDA_SUCCESS ? cuMemcpyDtoD_v2(dstDevice, srcDevice, ByteCount) : result;
}

API CUresult cuMemcpyPeerAsync(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice,
			       CUcontext srcContext, size_t ByteCount, CUstream hStream)
{
	CUresult result = check_pair(dstContext, srcContext, false);

	return result == CUDA_SUCCESS ? cuMemcpyDtoDAsync_v2(dstDevice, srcDevice, ByteCount, hStream) : result;
}
