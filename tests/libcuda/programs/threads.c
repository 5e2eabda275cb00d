// SPDX-License-Identifier: MIT
/*
 * Threads that start the driver and have a stream each, all at once: for ThreadSanitizer. Prints errors, and "ok".
 */
#include <pthread.h>
#include <stdint.h>

#include "driver.h"

#define THREADS 4
#define ROUNDS 25
#define WORDS 256

static pthread_barrier_t start;

static void must(CUresult result, const char *what)
{
	if (result != CUDA_SUCCESS) {
		fprintf(stderr, "%s: %d\n", what, (int)result);
		exit(1);
	}
}

#define MUST(name, ...) must(CU(name)(__VA_ARGS__), #name)

static void *work(void *argument)
{
	static const char image[] = "standin module\nkernel fill fill 10\nkernel sum sum 0\n";
	uint32_t number = (uint32_t)(uintptr_t)argument;
	uint64_t words = WORDS, total = 0;
	CUdeviceptr data, result;
	CUcontext context;
	CUfunction fill, sum;
	CUmodule module;
	CUstream stream;
	CUevent event;
	void *filling[] = { &data, &words, &number }, *summing[] = { &result, &data, &words };

	pthread_barrier_wait(&start);
	MUST(cuInit, 0);
	MUST(cuDevicePrimaryCtxRetain, &context, 0);
	MUST(cuCtxSetCurrent, context);
	MUST(cuModuleLoadData, &module, image);
	MUST(cuModuleGetFunction, &fill, module, "fill");
	MUST(cuModuleGetFunction, &sum, module, "sum");
	MUST(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
	MUST(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
	for (int round = 0; round < ROUNDS; round++) {
		MUST(cuMemAlloc, &data, WORDS * 4);
		MUST(cuMemAlloc, &result, 8);
		MUST(cuLaunchKernel, fill, 1, 1, 1, 32, 1, 1, 0, stream, filling, NULL);
		MUST(cuLaunchKernel, sum, 1, 1, 1, 32, 1, 1, 0, stream, summing, NULL);
		MUST(cuEventRecord, event, stream);
		MUST(cuEventSynchronize, event);
		MUST(cuMemcpyDtoHAsync, &total, result, 8, stream);
		MUST(cuStreamSynchronize, stream);
		if (total != (uint64_t)number * WORDS)
			must(CUDA_ERROR_UNKNOWN, "the sum");
		MUST(cuMemFree, data);
		MUST(cuMemFree, result);
	}
	MUST(cuEventDestroy, event);
	MUST(cuStreamDestroy, stream);
	return NULL;
}

int main(int count, char **given)
{
	pthread_t threads[THREADS];

	driver_open(count > 1 ? given[1] : "getproc", "libcuda.so.1");
	pthread_barrier_init(&start, NULL, THREADS);
	for (uintptr_t i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, work, (void *)(i + 1));
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	/* After all threads have ended, since the last release ends the context. */
	for (int i = 0; i < THREADS; i++)
		MUST(cuDevicePrimaryCtxRelease, 0);
	puts("ok");
	return 0;
}
