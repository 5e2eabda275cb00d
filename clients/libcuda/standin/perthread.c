// SPDX-License-Identifier: MIT
/* The calls of programs whose default stream is their thread's own: no stream is that one. */
#include "standin.h"

#define OWN(stream) ((stream) ? (stream) : CU_STREAM_PER_THREAD)

/* cuda.h declares them where it declares all versions of a function. */
#define STREAMED(name, parameters, ...)			\
	API CUresult name##_ptsz parameters;		\
	API CUresult name##_ptsz parameters		\
	{						\
		return name(__VA_ARGS__);		\
	}

STREAMED(cuLaunchKernel,
	 (CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX,
	  unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
	  void **kernelParams, void **extra),
	 f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, OWN(hStream), kernelParams,
	 extra)
STREAMED(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t size, CUstream stream), to, from, size,
	 OWN(stream))
STREAMED(cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t size, CUstream stream), to, from, size, OWN(stream))
STREAMED(cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream), to, from, size,
	 OWN(stream))
STREAMED(cuMemsetD32Async, (CUdeviceptr to, unsigned int value, size_t count, CUstream stream), to, value, count,
	 OWN(stream))
STREAMED(cuEventRecord, (CUevent event, CUstream stream), event, OWN(stream))
STREAMED(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned int flags), OWN(stream), event, flags)
STREAMED(cuStreamSynchronize, (CUstream stream), OWN(stream))
STREAMED(cuStreamQuery, (CUstream stream), OWN(stream))
STREAMED(cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode), OWN(stream), mode)
STREAMED(cuStreamEndCapture, (CUstream stream, CUgraph *graph), OWN(stream), graph)
STREAMED(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus *status), OWN(stream), status)
STREAMED(cuGraphLaunch, (CUgraphExec exec, CUstream stream), exec, OWN(stream))
STREAMED(cuMemAllocAsync, (CUdeviceptr *to, size_t size, CUstream stream), to, size, OWN(stream))
STREAMED(cuMemAllocFromPoolAsync, (CUdeviceptr *to, size_t size, CUmemoryPool pool, CUstream stream), to, size, pool,
	 OWN(stream))
STREAMED(cuMemFreeAsync, (CUdeviceptr address, CUstream stream), address, OWN(stream))
STREAMED(cuLaunchHostFunc, (CUstream stream, CUhostFn function, void *data), OWN(stream), function, data)

/* The same of calls that take no stream: copies are waited for. */
#define WAITED(name, async, parameters, ...)						\
	API CUresult name parameters;							\
	API CUresult name parameters							\
	{										\
		CUresult result = async(__VA_ARGS__, CU_STREAM_PER_THREAD);		\
											\
		return result == CUDA_SUCCESS ? cuStreamSynchronize(CU_STREAM_PER_THREAD) : result; \
	}

WAITED(cuMemcpyHtoD_v2_ptds, cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t size), to, from, size)
WAITED(cuMemcpyDtoH_v2_ptds, cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t size), to, from, size)
WAITED(cuMemcpyDtoD_v2_ptds, cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t size), to, from, size)
WAITED(cuMemsetD32_v2_ptds, cuMemsetD32Async, (CUdeviceptr to, unsigned int value, size_t count), to, value, count)
