// SPDX-License-Identifier: MIT
/*
 * Nanoseconds per call, one line per function: for the difference that the proxy makes. That shows
 * best at a call that does next to nothing; a launch on the stand-in wakes a thread, which is noise, and
 * one that is refused does not. An allocation comes first, so that the ledger is there.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define LOAD(name) __typeof__(&name) p_##name = (__typeof__(&name))find(#name)

static void *library;

static void *find(const char *name)
{
	CUresult (*getproc)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
	void *found = NULL;

	getproc = (__typeof__(getproc))dlsym(library, "cuGetProcAddress_v2");
	if (!getproc || getproc(name, &found, 12040, 0, NULL) || !found) {
		fprintf(stderr, "no %s\n", name);
		exit(1);
	}
	return found;
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

#define MEASURE(name, count, call) do {							\
	double start = now();								\
	for (long i = 0; i < (count); i++)						\
		if (!(call))								\
			return 1;							\
	printf("%s %.3f\n", name, (now() - start) / (double)(count));			\
} while (0)

int main(int count, char **given)
{
	static const char image[] = "standin module\nkernel nothing nothing 0\n";
	long rounds = count > 1 ? atol(given[1]) : 1000000;
	CUcontext context;
	CUstream stream;
	CUmodule module;
	CUfunction function;
	CUdeviceptr data;
	int priority;

	library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!library)
		return 1;
	LOAD(cuInit);
	LOAD(cuCtxGetCurrent);
	LOAD(cuCtxSetCurrent);
	LOAD(cuMemAlloc);
	LOAD(cuDevicePrimaryCtxRetain);
	LOAD(cuStreamCreate);
	LOAD(cuStreamGetPriority);
	LOAD(cuModuleLoadData);
	LOAD(cuModuleGetFunction);
	LOAD(cuLaunchKernel);
	LOAD(cuStreamSynchronize);
	if (p_cuInit(0) || p_cuDevicePrimaryCtxRetain(&context, 0) || p_cuCtxSetCurrent(context) ||
	    p_cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) || p_cuModuleLoadData(&module, image) ||
	    p_cuModuleGetFunction(&function, module, "nothing") || p_cuMemAlloc(&data, 512))
		return 1;
	MEASURE("cuCtxGetCurrent", rounds, !p_cuCtxGetCurrent(&context));
	MEASURE("cuStreamGetPriority", rounds, !p_cuStreamGetPriority(stream, &priority));
	MEASURE("cuLaunchKernel-refused", rounds,
		p_cuLaunchKernel(NULL, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL));
	MEASURE("cuLaunchKernel", rounds / 100,
		!p_cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL));
	return p_cuStreamSynchronize(stream) != CUDA_SUCCESS;
}
