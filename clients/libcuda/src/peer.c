// SPDX-License-Identifier: MIT
/*
 * Peer access. Enabled between two contexts it opens all memory of cuMemAlloc of one to the other, what
 * is allocated later too; mapped memory is open to those devices that were named for it. So for primary
 * contexts, whose memory lies in windows, the proxy names them.
 */
#include "memory.h"
#include "proxy.h"

/* The devices of two primary contexts, the current one and another. */
static bool is_pair(CUcontext other, CUdevice *mine, CUdevice *theirs)
{
	CUcontext current;

	return real_cuCtxGetCurrent(&current) == CUDA_SUCCESS && current != other &&
	       mpsd_memory_is_primary(current, mine) && mpsd_memory_is_primary(other, theirs) && *mine != *theirs;
}

CUresult wrap_cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags)
{
	CUresult result = real_cuCtxEnablePeerAccess(peerContext, Flags);
	CUdevice mine, theirs;

	if (result != CUDA_SUCCESS || !is_pair(peerContext, &mine, &theirs))
		return result;
	result = mpsd_memory_set_peer(theirs, mine, true);
	if (result != CUDA_SUCCESS) {
		mpsd_memory_set_peer(theirs, mine, false);
		real_cuCtxDisablePeerAccess(peerContext);
	}
	return result;
}

/* Work that runs may use what is about to be closed. */
CUresult wrap_cuCtxDisablePeerAccess(CUcontext peerContext)
{
	CUresult result = real_cuCtxDisablePeerAccess(peerContext);
	CUdevice mine, theirs;

	if (result != CUDA_SUCCESS || !is_pair(peerContext, &mine, &theirs) ||
	    real_cuCtxSynchronize() != CUDA_SUCCESS)
		return result;
	mpsd_memory_set_peer(theirs, mine, false);
	return result;
}
