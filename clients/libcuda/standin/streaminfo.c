// SPDX-License-Identifier: MIT
/* What is asked about streams, and set of them. */
#include <string.h>

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

static bool is_attribute(CUstreamAttrID attribute)
{
	switch (attribute) {
	case CU_STREAM_ATTRIBUTE_ACCESS_POLICY_WINDOW:
	case CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY:
	case CU_STREAM_ATTRIBUTE_PRIORITY:
	case CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
	case CU_STREAM_ATTRIBUTE_MEM_SYNC_DOMAIN:
		return true;
	default:
		return false;
	}
}

API CUresult cuStreamGetAttribute(CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue *value_out)
{
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (!value_out || !is_attribute(attr))
		return leave(CUDA_ERROR_INVALID_VALUE);
	*value_out = stream->attributes[attr];
	if (attr == CU_STREAM_ATTRIBUTE_PRIORITY)
		value_out->priority = stream->priority;
	return leave(CUDA_SUCCESS);
}

API CUresult cuStreamSetAttribute(CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue *value)
{
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (!value || !is_attribute(attr) ||
	    (attr == CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY &&
	     (value->syncPolicy < CU_SYNC_POLICY_AUTO || value->syncPolicy > CU_SYNC_POLICY_BLOCKING_SYNC)))
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (attr == CU_STREAM_ATTRIBUTE_PRIORITY)
		stream->priority = value->priority > 0 ? 0 : value->priority < -5 ? -5 : value->priority;
	else
		stream->attributes[attr] = *value;
	return leave(CUDA_SUCCESS);
}

API CUresult cuStreamCopyAttributes(CUstream dst, CUstream src)
{
	CUstream from, to;
	CUresult result = enter_stream(src, &from);

	if (result != CUDA_SUCCESS)
		return result;
	result = find_stream(from->context, dst, &to);
	if (result != CUDA_SUCCESS)
		return leave(result);
	memmove(to->attributes, from->attributes, sizeof(to->attributes));
	return leave(CUDA_SUCCESS);
}
