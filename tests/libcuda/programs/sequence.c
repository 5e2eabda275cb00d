// SPDX-License-Identifier: MIT
/*
 * A sequence of calls. Each call is printed as a line with its return code and output. Nothing printed depends on
 * time or addresses, so two runs can be compared as texts.
 */
#include <fcntl.h>
#include <semaphore.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"

#define DO(name, ...) printf("%s %d", #name, (int)CU(name)(__VA_ARGS__))
#define END puts("")
#define STEP(name, ...) do { DO(name, __VA_ARGS__); END; } while (0)

#define MB ((size_t)1 << 20)
#define IMAGE "standin module\nkernel fill fill 0\nkernel slow_fill fill 2000\nkernel add add 100\n" \
	      "kernel sum sum 0\nkernel store store 0\nglobal table 256\n"

static CUcontext context;
static CUmodule module;
static CUfunction fill, slow_fill, add, sum, store;

static void start(void)
{
	char name[64] = "";
	CUdevice device = -1;
	int count = 0, version = 0, value = 0;
	size_t total = 0;
	const char *text = NULL;
	CUcontext current = (CUcontext)1;

	STEP(cuDeviceGetCount, &count);
	STEP(cuInit, 7);
	STEP(cuInit, 0);
	DO(cuDriverGetVersion, &version), printf(" %d", version), END;
	DO(cuDeviceGetCount, &count), printf(" %d", count), END;
	DO(cuDeviceGet, &device, 0), printf(" %d", device), END;
	STEP(cuDeviceGet, &device, 1);
	DO(cuDeviceGetName, name, sizeof(name), 0), printf(" %s", name), END;
	DO(cuDeviceTotalMem, &total, 0), printf(" %zu", total), END;
	DO(cuDeviceGetAttribute, &value, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 0), printf(" %d", value), END;
	DO(cuGetErrorName, CUDA_ERROR_ILLEGAL_ADDRESS, &text), printf(" %s", text), END;
	DO(cuGetErrorString, CUDA_ERROR_OUT_OF_MEMORY, &text), printf(" %s", text), END;
	DO(cuCtxGetCurrent, &current), printf(" %d", current == NULL), END;
	STEP(cuCtxSynchronize);
	STEP(cuDevicePrimaryCtxRetain, &context, 0);
	STEP(cuCtxSetCurrent, context);
	DO(cuCtxGetCurrent, &current), printf(" %d", current == context), END;
	DO(cuCtxGetDevice, &device), printf(" %d", device), END;
	STEP(cuCtxSynchronize);
}

static void load(void)
{
	CUdeviceptr table = 0;
	size_t size = 0, offset = 0;

	STEP(cuModuleLoadData, &module, "not an image");
	STEP(cuModuleLoadData, &module, IMAGE);
	STEP(cuModuleGetFunction, &fill, module, "none");
	STEP(cuModuleGetFunction, &fill, module, "fill");
	STEP(cuModuleGetFunction, &slow_fill, module, "slow_fill");
	STEP(cuModuleGetFunction, &add, module, "add");
	STEP(cuModuleGetFunction, &sum, module, "sum");
	STEP(cuModuleGetFunction, &store, module, "store");
	DO(cuModuleGetGlobal, &table, &size, module, "table"), printf(" %d %zu", table != 0, size), END;
	DO(cuFuncGetParamInfo, fill, 1, &offset, &size), printf(" %zu %zu", offset, size), END;
}

static void memory(void)
{
	CUdeviceptr a = 0, b = 0, base = 0;
	size_t size = 0, pitch = 0, before = 0, after = 0, total = 0;
	unsigned int kind = 0;
	char out[64] = "";
	CUDA_MEMCPY2D plane = { 0 };

	STEP(cuMemAlloc, &a, 0);
	STEP(cuMemAlloc, &a, (size_t)1 << 50);
	DO(cuMemGetInfo, &before, &total), printf(" %d", before <= total), END;
	DO(cuMemAlloc, &a, 1 * MB), printf(" %d", a % 256 == 0), END;
	STEP(cuMemAlloc, &b, 100);
	DO(cuMemGetInfo, &after, &total), printf(" %d", after < before), END;
	DO(cuMemGetAddressRange, &base, &size, a + 4711), printf(" %d %zu", base == a, size), END;
	STEP(cuMemGetAddressRange, &base, &size, 4096);
	DO(cuPointerGetAttribute, &kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, a), printf(" %u", kind), END;
	STEP(cuPointerGetAttribute, &kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)out);
	STEP(cuMemsetD8, a, 'x', 64);
	STEP(cuMemsetD32, a + 4, 0x64636261, 2);
	STEP(cuMemsetD32, a + 1, 0, 2);
	/* Behind the allocation may lie the next one, but not so much. */
	STEP(cuMemsetD8, a + MB - 1, 0, (size_t)1 << 40);
	DO(cuMemcpyDtoH, out, a, 16), printf(" %.16s", out), END;
	STEP(cuMemcpyHtoD, a, "hello, device", 14);
	STEP(cuMemcpyDtoD, b, a, 14);
	DO(cuMemcpyDtoH, out, b, 14), printf(" %s", out), END;
	STEP(cuMemcpyDtoH, out, b + 90, 20);
	STEP(cuMemFree, b + 1);
	STEP(cuMemFree, b);
	STEP(cuMemFree, b);
	STEP(cuMemFree, 0);
	DO(cuMemAllocPitch, &b, &pitch, 100, 8, 4), printf(" %d", pitch >= 100), END;
	plane = (CUDA_MEMCPY2D){
		.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = "abcdefgh", .srcPitch = 4,
		.dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = b, .dstPitch = pitch,
		.WidthInBytes = 4, .Height = 2,
	};
	STEP(cuMemcpy2D, &plane);
	DO(cuMemcpyDtoH, out, b + pitch, 4), printf(" %.4s", out), END;
	STEP(cuMemFree, b);
	STEP(cuMemFree, a);
	DO(cuMemGetInfo, &after, &total), printf(" %d", after == before), END;
}

static void CUDA_CB note(void *data)
{
	*(int *)data += 1;
}

/* The arguments of a callback, and whether it may call the driver. */
struct told {
	CUstream stream;
	CUresult status, called;
	sem_t was;
};

static void CUDA_CB tell(CUstream stream, CUresult status, void *data)
{
	struct told *told = data;

	told->stream = stream;
	told->status = status;
	told->called = CU(cuStreamQuery)(stream);
	sem_post(&told->was);
}

static int was_told(struct told *told)
{
	struct timespec until;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += 20;
	return !sem_timedwait(&told->was, &until);
}

static void CUDA_CB hold(void *data)
{
	sem_wait(data);
}

static void streams(void)
{
	CUstream one = NULL, two = NULL;
	CUevent event = NULL, late = NULL;
	CUdeviceptr data = 0, total = 0;
	uint64_t words = 1024, sum_of = 0;
	uint32_t value = 3;
	int called = 0, least = 0, greatest = 0, positive = 0;
	struct told told = { 0 };
	float elapsed = 0;
	void *fill_with[] = { &data, &words, &value }, *sum_up[] = { &total, &data, &words };

	DO(cuCtxGetStreamPriorityRange, &least, &greatest), printf(" %d", least >= greatest), END;
	STEP(cuStreamCreate, &one, CU_STREAM_NON_BLOCKING);
	STEP(cuStreamCreateWithPriority, &two, CU_STREAM_NON_BLOCKING, greatest);
	STEP(cuEventCreate, &event, CU_EVENT_DEFAULT);
	STEP(cuEventCreate, &late, CU_EVENT_DEFAULT);
	STEP(cuEventQuery, event);
	STEP(cuMemAlloc, &data, words * 4);
	STEP(cuMemAlloc, &total, 8);
	STEP(cuEventRecord, event, one);
	/* The other stream waits: its sum must see all of the slow fill. */
	STEP(cuLaunchKernel, slow_fill, 1, 1, 1, 32, 1, 1, 0, one, fill_with, NULL);
	value = 99;
	STEP(cuEventRecord, late, one);
	STEP(cuStreamWaitEvent, two, late, 0);
	STEP(cuLaunchKernel, sum, 1, 1, 1, 32, 1, 1, 0, two, sum_up, NULL);
	STEP(cuLaunchHostFunc, two, note, &called);
	DO(cuStreamSynchronize, two), printf(" %d", called), END;
	sem_init(&told.was, 0, 0);
	STEP(cuStreamAddCallback, two, NULL, NULL, 0);
	STEP(cuStreamAddCallback, two, tell, &told, 1);
	STEP(cuStreamAddCallback, two, tell, &told, 0);
	DO(cuStreamSynchronize, two), printf(" %d", was_told(&told));
	printf(" %d %d %d", told.stream == two, told.status, told.called), END;
	sem_destroy(&told.was);
	DO(cuMemcpyDtoH, &sum_of, total, 8), printf(" %llu", (unsigned long long)sum_of), END;
	DO(cuEventElapsedTime, &elapsed, event, late), positive = elapsed >= 2, printf(" %d", positive), END;
	STEP(cuEventSynchronize, late);
	STEP(cuEventQuery, late);
	/* Blocking streams and the default stream keep their order. */
	STEP(cuStreamDestroy, two);
	STEP(cuStreamCreate, &two, CU_STREAM_DEFAULT);
	STEP(cuLaunchKernel, slow_fill, 1, 1, 1, 32, 1, 1, 0, two, fill_with, NULL);
	STEP(cuLaunchKernel, sum, 1, 1, 1, 32, 1, 1, 0, NULL, sum_up, NULL);
	DO(cuMemcpyDtoH, &sum_of, total, 8), printf(" %llu", (unsigned long long)sum_of), END;
	/* cuMemFree waits for all running work. */
	STEP(cuLaunchKernel, slow_fill, 1, 1, 1, 32, 1, 1, 0, one, fill_with, NULL);
	STEP(cuMemFree, data);
	STEP(cuStreamQuery, one);
	STEP(cuLaunchKernel, slow_fill, 1, 1, 1, 2048, 1, 1, 0, one, fill_with, NULL);
	STEP(cuStreamDestroy, one);
	STEP(cuEventDestroy, event);
	STEP(cuEventDestroy, late);
	STEP(cuMemFree, total);
	STEP(cuStreamDestroy, two);
}

static void graphs(void)
{
	CUstream stream = NULL;
	CUgraph graph = NULL;
	CUgraphExec exec = NULL;
	CUdeviceptr data = 0;
	CUstreamCaptureStatus status = 0;
	uint64_t words = 16;
	uint32_t value = 5, word = 0;
	size_t nodes = 0;
	void *add_to[] = { &data, &words, &value };

	STEP(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
	STEP(cuMemAlloc, &data, words * 4);
	STEP(cuMemsetD32, data, 1, words);
	STEP(cuStreamBeginCapture, NULL, CU_STREAM_CAPTURE_MODE_GLOBAL);
	STEP(cuStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
	STEP(cuLaunchKernel, add, 1, 1, 1, 32, 1, 1, 0, stream, add_to, NULL);
	STEP(cuLaunchKernel, add, 1, 1, 1, 32, 1, 1, 0, stream, add_to, NULL);
	DO(cuStreamIsCapturing, stream, &status), printf(" %d", status), END;
	STEP(cuStreamEndCapture, stream, &graph);
	DO(cuGraphGetNodes, graph, NULL, &nodes), printf(" %zu", nodes), END;
	STEP(cuGraphInstantiateWithFlags, &exec, graph, 0);
	STEP(cuGraphDestroy, graph);
	STEP(cuGraphLaunch, exec, stream);
	STEP(cuGraphLaunch, exec, stream);
	STEP(cuStreamSynchronize, stream);
	DO(cuMemcpyDtoH, &word, data + 60, 4), printf(" %u", word), END;
	STEP(cuGraphExecDestroy, exec);
	STEP(cuMemFree, data);
	STEP(cuStreamDestroy, stream);
}

static void virtual_memory(void)
{
	CUmemAllocationProp property = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0 },
	};
	CUmemAccessDesc access = { .location = property.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle handle = 0, again = 0;
	CUdeviceptr window = 0, first, second;
	size_t grain = 0;
	char out[16] = "";
	int fd = -1;

	DO(cuMemGetAllocationGranularity, &grain, &property, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
	printf(" %zu", grain), END;
	STEP(cuMemCreate, &handle, grain + 1, &property, 0);
	STEP(cuMemCreate, &handle, grain, &property, 0);
	DO(cuMemAddressReserve, &window, 64 * MB, 0, 0, 0), printf(" %d", window % grain == 0), END;
	first = window + grain, second = window + 4 * grain;
	STEP(cuMemMap, first, grain, 0, handle, 0);
	STEP(cuMemMap, first, grain, 0, handle, 0);
	STEP(cuMemcpyHtoD, first, "mapped", 7);
	STEP(cuMemSetAccess, first, grain, &access, 1);
	STEP(cuMemcpyHtoD, first, "mapped", 7);
	DO(cuMemExportToShareableHandle, &fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	printf(" %d", fd >= 0 && (fcntl(fd, F_GETFD) & FD_CLOEXEC)), END;
	STEP(cuMemRelease, handle);
	STEP(cuMemUnmap, first, grain);
	STEP(cuMemcpyDtoH, out, first, 7);
	STEP(cuMemImportFromShareableHandle, &again, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	close(fd);
	STEP(cuMemMap, second, grain, 0, again, 0);
	STEP(cuMemSetAccess, second, grain, &access, 1);
	DO(cuMemcpyDtoH, out, second, 7), printf(" %s", out), END;
	STEP(cuMemAddressFree, window, 64 * MB);
	STEP(cuMemUnmap, second, grain);
	STEP(cuMemRelease, again);
	STEP(cuMemRelease, again);
	STEP(cuMemAddressFree, window, 64 * MB);
}

/* Last, since the error persists. */
static void fault(void)
{
	CUdeviceptr data = 0, stray = 64;	/* in the null page: nothing else can be mapped there */
	uint32_t value = 1;
	void *arguments[] = { &stray, &value };

	struct told told = { 0 };
	CUstream stream = NULL;
	int called = 0;
	sem_t may_go;

	STEP(cuMemAlloc, &data, 4096);
	STEP(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
	sem_init(&told.was, 0, 0);
	sem_init(&may_go, 0, 0);
	/*
	 * All work is queued before any runs. Behind the fault a host callback does not run, and a stream callback
	 * gets the error.
	 */
	STEP(cuLaunchHostFunc, stream, hold, &may_go);
	STEP(cuLaunchKernel, store, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL);
	STEP(cuLaunchHostFunc, stream, note, &called);
	STEP(cuStreamAddCallback, stream, tell, &told, 0);
	sem_post(&may_go);
	printf("told %d", was_told(&told));
	printf(" %d %d %d", told.stream == stream, told.status, called), END;
	STEP(cuCtxSynchronize);
	STEP(cuMemFree, data);
	STEP(cuStreamQuery, NULL);
	STEP(cuDevicePrimaryCtxReset, 0);
	STEP(cuCtxSynchronize);
}

int main(int count, char **given)
{
	driver_open(count > 1 ? given[1] : "dlsym", count > 2 ? given[2] : "libcuda.so.1");
	start();
	load();
	memory();
	streams();
	graphs();
	virtual_memory();
	STEP(cuModuleUnload, module);
	STEP(cuModuleLoadData, &module, IMAGE);
	STEP(cuModuleGetFunction, &store, module, "store");
	fault();
	return 0;
}
