// SPDX-License-Identifier: MIT
/*
 * Functions of the host in streams, run by the stream's thread. Once the context is broken a function does not run, and
 * a callback is told so.
 */
#include "standin.h"

static void call_function(struct operation *operation)
{
	operation->host.function(operation->host.data);
}

static void call_back(struct operation *operation)
{
	operation->host.callback(operation->host.stream, operation->status, operation->host.data);
}

CUresult prepare_host(const CUDA_HOST_NODE_PARAMS *given, struct operation *operation)
{
	*operation = (struct operation){ .run = call_function, .type = CU_GRAPH_NODE_TYPE_HOST };
	if (!given || !given->fn)
		return CUDA_ERROR_INVALID_VALUE;
	operation->host.function = given->fn;
	operation->host.data = given->userData;
	return CUDA_SUCCESS;
}

API CUresult cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData)
{
	struct operation operation = { .run = call_function, .type = CU_GRAPH_NODE_TYPE_HOST,
				       .host = { .function = fn, .data = userData } };
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	return leave(fn ? submit(stream, &operation) : CUDA_ERROR_INVALID_VALUE);
}

API CUresult cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags)
{
	struct operation operation = {
		.run = call_back,
		.always = true,
		.host = { .callback = callback, .stream = hStream, .data = userData },
	};
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (!callback || flags)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (stream->capture)
		return leave(spoil(stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
	return leave(submit(stream, &operation));
}
