// SPDX-License-Identifier: MIT
/*
 * Two processes share memory by legacy IPC. Each call is printed as a line with its return code and output, so that
 * two runs can be compared as texts. The processes fork before either has started the driver.
 */
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver.h"

#define DO(name, ...) printf("%s %d", #name, (int)CU(name)(__VA_ARGS__))
#define END (puts(""), fflush(stdout))
#define STEP(name, ...) do { DO(name, __VA_ARGS__); END; } while (0)

#define MB ((size_t)1 << 20)
#define LAZY CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS

struct offer {
	CUipcMemHandle large, small, other;
};

static int to_opener[2], to_exporter[2];

static void must(int is, const char *what)
{
	if (!is) {
		fprintf(stderr, "%s\n", what);
		exit(7);
	}
}

static void hand_over(int fd, const void *data, size_t size)
{
	must(write(fd, data, size) == (ssize_t)size, "write");
}

static void wait_for(int fd, void *data, size_t size)
{
	must(read(fd, data, size) == (ssize_t)size, "read");
}

static void start(void)
{
	CUcontext context;

	STEP(cuInit, 0);
	STEP(cuDevicePrimaryCtxRetain, &context, 0);
	STEP(cuCtxSetCurrent, context);
}

static void exporter(void)
{
	CUdeviceptr large = 0, small = 0, other = 0, again = 0;
	struct offer offer;
	CUipcMemHandle same, later;
	int capable = 0;
	char out[16] = "";

	start();
	STEP(cuMemAlloc, &large, 5 * MB);
	STEP(cuMemAlloc, &small, 1000);
	STEP(cuMemAlloc, &other, 2000);
	STEP(cuMemcpyHtoD, large + 3 * MB, "a large one", 12);
	STEP(cuMemcpyHtoD, small, "a small one", 12);
	STEP(cuMemcpyHtoD, other, "another one", 12);
	DO(cuPointerGetAttribute, &capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, small);
	printf(" %d", capable), END;
	STEP(cuIpcGetMemHandle, &offer.large, 4096);
	STEP(cuIpcGetMemHandle, NULL, large);
	STEP(cuIpcGetMemHandle, &offer.large, large);
	STEP(cuIpcGetMemHandle, &offer.small, small);
	STEP(cuIpcGetMemHandle, &offer.other, other);
	DO(cuIpcGetMemHandle, &same, small + 100), printf(" %d", !memcmp(&same, &offer.small, sizeof(same))), END;
	printf("distinct %d", memcmp(&offer.small, &offer.other, sizeof(same)) != 0), END;
	/* The exporting process may not open its own memory. */
	STEP(cuIpcOpenMemHandle, &again, offer.small, LAZY);
	STEP(cuIpcCloseMemHandle, small);
	hand_over(to_opener[1], &offer, sizeof(offer));
	wait_for(to_exporter[0], out, 1);
	DO(cuMemcpyDtoH, out, small, 12), printf(" %s", out), END;
	/* A later allocation at that address is another allocation. */
	STEP(cuMemFree, other);
	STEP(cuMemAlloc, &again, 2000);
	DO(cuIpcGetMemHandle, &later, again), printf(" %d", memcmp(&later, &offer.other, sizeof(later)) != 0), END;
	STEP(cuMemFree, again);
	STEP(cuMemFree, small);
	STEP(cuMemFree, large);
	STEP(cuIpcGetMemHandle, &same, small);
	STEP(cuDevicePrimaryCtxReset, 0);
	hand_over(to_opener[1], "x", 1);
}

static void look(CUdeviceptr at, CUdeviceptr expected)
{
	unsigned long long id = 0;
	CUdeviceptr base = 0;
	CUcontext owner = NULL, current = NULL;
	size_t size = 0;
	int capable = 1, kind = 0, ordinal = 7;

	DO(cuMemGetAddressRange, &base, &size, at), printf(" %d %zu", base == expected, size), END;
	DO(cuPointerGetAttribute, &capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, at);
	printf(" %d", capable & 1), END;
	DO(cuPointerGetAttribute, &kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at), printf(" %d", kind), END;
	DO(cuPointerGetAttribute, &ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at), printf(" %d", ordinal), END;
	DO(cuPointerGetAttribute, &id, CU_POINTER_ATTRIBUTE_BUFFER_ID, at), printf(" %d", id != 0), END;
	STEP(cuCtxGetCurrent, &current);
	DO(cuPointerGetAttribute, &owner, CU_POINTER_ATTRIBUTE_CONTEXT, at), printf(" %d", owner == current), END;
}

static void opener(void)
{
	CUdeviceptr large = 0, small = 0, again = 0, other = 0;
	CUipcMemHandle garbage, nobody;
	struct offer offer;
	char out[16] = "";

	wait_for(to_opener[0], &offer, sizeof(offer));
	memset(&garbage, 'g', sizeof(garbage));
	STEP(cuIpcOpenMemHandle, &small, offer.small, LAZY);
	start();
	STEP(cuIpcOpenMemHandle, &small, offer.small, 6);
	STEP(cuIpcOpenMemHandle, NULL, offer.small, LAZY);
	STEP(cuIpcOpenMemHandle, &small, garbage, LAZY);
	STEP(cuIpcOpenMemHandle, &small, offer.small, LAZY);
	DO(cuIpcOpenMemHandle, &again, offer.small, LAZY), printf(" %d", again == small), END;
	STEP(cuIpcOpenMemHandle, &large, offer.large, LAZY);
	STEP(cuIpcOpenMemHandle, &other, offer.other, LAZY);
	look(small + 10, small);
	look(large + 3 * MB, large);
	DO(cuMemcpyDtoH, out, small, 12), printf(" %s", out), END;
	DO(cuMemcpyDtoH, out, large + 3 * MB, 12), printf(" %s", out), END;
	DO(cuMemcpyDtoH, out, other, 12), printf(" %s", out), END;
	STEP(cuIpcGetMemHandle, &nobody, small);
	STEP(cuMemFree, small);
	STEP(cuIpcCloseMemHandle, small + 1);
	STEP(cuMemcpyHtoD, small, "told by B..", 12);
	STEP(cuIpcCloseMemHandle, small);
	DO(cuMemcpyDtoH, out, small, 12), printf(" %s", out), END;
	STEP(cuIpcCloseMemHandle, small);
	STEP(cuMemcpyDtoH, out, small, 12);
	STEP(cuIpcCloseMemHandle, small);
	DO(cuMemcpyDtoH, out, other, 12), printf(" %s", out), END;
	STEP(cuIpcCloseMemHandle, large);
	STEP(cuIpcCloseMemHandle, other);
	/* Open it again, so that the end of the context closes it. */
	STEP(cuIpcOpenMemHandle, &large, offer.large, LAZY);
	DO(cuMemcpyDtoH, out, large + 3 * MB, 12), printf(" %s", out), END;
	hand_over(to_exporter[1], "x", 1);
	wait_for(to_opener[0], out, 1);
	STEP(cuDevicePrimaryCtxReset, 0);
}

int main(int count, char **given)
{
	int status = 0;
	pid_t child;

	must(!pipe(to_opener) && !pipe(to_exporter), "pipe");
	child = fork();
	must(child >= 0, "fork");
	/* A process that survives the other sees the end of its pipe. */
	close(child ? to_opener[0] : to_opener[1]);
	close(child ? to_exporter[1] : to_exporter[0]);
	driver_open(count > 1 ? given[1] : "dlsym", count > 2 ? given[2] : "libcuda.so.1");
	if (!child) {
		opener();
		return 0;
	}
	exporter();
	must(waitpid(child, &status, 0) == child && !status, "the opener failed");
	puts("ok");
	return 0;
}
