// SPDX-License-Identifier: MIT
/* What is asked about streams. */
#include "standin.h"

API CUresult cuStreamGetPriority(CUstream hStream, int *priority)
{
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (!priority)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*priority = stream->priority;
	return leave(CUDA_SUCCESS);
}

API CUresult cuStreamGetFlags(CUstream hStream, unsigned int *flags)
{
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (!flags)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*flags = stream->flags;
	return leave(CUDA_SUCCESS);
}

API CUresult cuStreamGetCtx(CUstream hStream, CUcontext *pctx)
{
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (!pctx)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*pctx = stream->context;
	return leave(CUDA_SUCCESS);
}
