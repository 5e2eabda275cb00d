// SPDX-License-Identifier: MIT
/*
 * Threads of one process export the same allocations, and threads of another open, read and close them at once: for
 * ThreadSanitizer. Each thread prints its errors; the program prints "ok".
 */
#include <pthread.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver.h"

#define THREADS 4
#define ROUNDS 25
#define SHARED 6

static CUcontext context;
static CUdeviceptr mine[SHARED];
static CUipcMemHandle handles[THREADS][SHARED], offered[SHARED];

static void must(CUresult result, const char *what)
{
	if (result != CUDA_SUCCESS) {
		fprintf(stderr, "%s: %d\n", what, (int)result);
		exit(1);
	}
}

#define MUST(name, ...) must(CU(name)(__VA_ARGS__), #name)

static void start(void)
{
	MUST(cuInit, 0);
	MUST(cuDevicePrimaryCtxRetain, &context, 0);
	MUST(cuCtxSetCurrent, context);
}

static void together(void *(*work)(void *))
{
	pthread_t threads[THREADS];

	for (uintptr_t i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, work, (void *)i);
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
}

static void *export_all(void *argument)
{
	uintptr_t number = (uintptr_t)argument;
	CUdeviceptr own;

	MUST(cuCtxSetCurrent, context);
	for (int i = 0; i < SHARED; i++) {
		MUST(cuMemAlloc, &own, 3 << 20);
		MUST(cuIpcGetMemHandle, &handles[number][i], mine[i]);
		MUST(cuMemFree, own);
	}
	return NULL;
}

static void *open_all(void *argument)
{
	CUdeviceptr there, again;
	int found;

	MUST(cuCtxSetCurrent, context);
	for (int round = 0; round < ROUNDS; round++) {
		int which = (round + (int)(uintptr_t)argument) % SHARED;

		MUST(cuIpcOpenMemHandle, &there, offered[which], 1);
		MUST(cuIpcOpenMemHandle, &again, offered[which], 1);
		MUST(cuMemcpyDtoH, &found, there, sizeof(found));
		if (found != which + 1 || there != again)
			must(CUDA_ERROR_UNKNOWN, "what was shared");
		MUST(cuIpcCloseMemHandle, there);
		MUST(cuMemcpyDtoH, &found, again, sizeof(found));
		MUST(cuIpcCloseMemHandle, again);
	}
	return NULL;
}

static void exporter(int to)
{
	start();
	for (int i = 0, value = 1; i < SHARED; i++, value++) {
		MUST(cuMemAlloc, &mine[i], i % 2 ? 1000 : 3 << 20);
		MUST(cuMemcpyHtoD, mine[i], &value, sizeof(value));
	}
	together(export_all);
	for (int i = 1; i < THREADS; i++)
		if (memcmp(handles[i], handles[0], sizeof(handles[0])))
			must(CUDA_ERROR_UNKNOWN, "one handle for one allocation");
	if (write(to, handles[0], sizeof(handles[0])) != sizeof(handles[0]))
		must(CUDA_ERROR_UNKNOWN, "write");
}

static int opener(int from)
{
	if (read(from, offered, sizeof(offered)) != sizeof(offered))
		return 1;
	start();
	together(open_all);
	MUST(cuDevicePrimaryCtxReset, 0);
	return 0;
}

int main(int count, char **given)
{
	int ends[2], status = 0;
	pid_t child;

	if (pipe(ends))
		return 2;
	child = fork();
	close(child ? ends[0] : ends[1]);
	driver_open(count > 1 ? given[1] : "getproc", "libcuda.so.1");
	if (!child)
		return opener(ends[0]);
	exporter(ends[1]);
	if (waitpid(child, &status, 0) != child || status)
		return 3;
	MUST(cuDevicePrimaryCtxReset, 0);
	puts("ok");
	return 0;
}
