// SPDX-License-Identifier: MIT
/*
 * launch CALLS IMAGE REFUSED: nanoseconds per call, for the difference that the proxy makes. For each line of
 * its input it measures all functions once, and answers with a line of
 *
 *	NAME NANOSECONDS NANOSECONDS
 *
 * for each, and an empty one. The first figure is of libcuda.so.1 as the loader finds it; the second of the
 * file that MPSD_REAL_LIBCUDA names, in the same process and context. Where that is the same library, they
 * differ by noise.
 *
 * IMAGE is a file with a kernel `nothing`, and another, `eight`, that is given eight addresses. The difference shows
 * best at a call that does next to nothing. A launch that is refused (REFUSED 1) is one on the stand-in, where a real
 * one wakes a thread. Allocations come first, so that the ledger is there.
 *
 * A token is what a language model's step is for the driver: many small kernels, each after the program has used the
 * processor's caches for something else (that time is not counted), and a copy to the host that is waited for.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* What a queue of launches holds on any driver: the rest of a block would wait for the GPU. */
#define LAUNCHES 256

#define TOKEN "token"
#define OF_TOKEN 160		/* kernels */
#define GIVEN 8			/* addresses, each */
#define PIECES 16		/* of memory, that all of them are given */
#define PIECE_BYTES ((size_t)2 << 20)
#define CACHE_BYTES ((size_t)1 << 20)
#define LINE 64

#define FUNCTIONS(with)			\
	with(cuCtxGetCurrent)		\
	with(cuStreamQuery)		\
	with(cuStreamGetPriority)	\
	with(cuStreamSynchronize)	\
	with(cuMemcpyDtoHAsync)		\
	with(cuLaunchKernel)

#define MEMBER(name) __typeof__(&name) name;
struct api {
	FUNCTIONS(MEMBER)
};

static CUfunction nothing, eight;
static CUdeviceptr pieces[PIECES];
static CUstream stream;
static int (*settle)(CUstream);

static void fail(const char *what)
{
	fprintf(stderr, "launch: %s\n", what);
	exit(1);
}

static void *find(void *library, const char *name)
{
	CUresult (*getproc)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
	void *found = NULL;

	getproc = (__typeof__(getproc))dlsym(library, "cuGetProcAddress_v2");
	if (!getproc || getproc(name, &found, 12040, 0, NULL) || !found)
		fail(name);
	return found;
}

static void fill(struct api *api, void *library)
{
#define FIND(name) api->name = (__typeof__(&name))find(library, #name);
	FUNCTIONS(FIND)
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

#define MEASURED(name, call)								\
static double name(const struct api *api, long count)					\
{											\
	double start = now();								\
	for (long i = 0; i < count; i++)						\
		if (!(call))								\
			fail(#name);							\
	return now() - start;								\
}

static CUcontext current;
static int priority;

MEASURED(context, !api->cuCtxGetCurrent(&current))
MEASURED(query, !api->cuStreamQuery(stream))
MEASURED(get_priority, !api->cuStreamGetPriority(stream, &priority))
MEASURED(refused, api->cuLaunchKernel(NULL, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL))
MEASURED(launch_some, !api->cuLaunchKernel(nothing, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL))

static double launch(const struct api *api, long count)
{
	double spent = 0;

	for (long left = count; left > 0; left -= LAUNCHES) {
		spent += launch_some(api, left < LAUNCHES ? left : LAUNCHES);
		if (settle(stream))
			fail("cuStreamSynchronize");
	}
	return spent;
}

static void use_caches(void)
{
	static volatile char used[CACHE_BYTES];

	for (size_t at = 0; at < CACHE_BYTES; at += LINE)
		used[at]++;
}

static double token(const struct api *api, long count)
{
	double spent = 0, start;
	int word;

	for (long i = 0; i < count * OF_TOKEN; i++) {
		CUdeviceptr given[GIVEN];
		void *parameters[GIVEN];

		for (long j = 0; j < GIVEN; j++) {
			given[j] = pieces[(i + j) % PIECES];
			parameters[j] = &given[j];
		}
		use_caches();
		start = now();
		if (api->cuLaunchKernel(eight, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL))
			fail("a token's kernel");
		if ((i + 1) % OF_TOKEN == 0 && (api->cuMemcpyDtoHAsync(&word, pieces[0], sizeof(word), stream) ||
						api->cuStreamSynchronize(stream)))
			fail("a token's end");
		spent += now() - start;
	}
	return spent;
}

/* In turns that are short: what changes the clock of the processor meets both. */
static void compare(const char *name, double (*measure)(const struct api *, long), const struct api *apis,
		    long count)
{
	enum { TURNS = 8 };
	double spent[2] = { 0 };
	long each = count / TURNS > 0 ? count / TURNS : 1;

	for (int turn = 0; turn < TURNS; turn++)
		for (int side = 0; side < 2; side++)
			spent[side ^ (turn & 1)] += measure(&apis[side ^ (turn & 1)], each);
	printf("%s %.3f %.3f\n", name, spent[0] / (double)(each * TURNS), spent[1] / (double)(each * TURNS));
}

static char *read_image(const char *path)
{
	static char image[1 << 20];
	FILE *file = fopen(path, "rb");

	if (!file || !fread(image, 1, sizeof(image) - 1, file))
		fail(path);
	fclose(file);
	return image;
}

static void prepare(void *library, const char *image)
{
#define LOAD(name) __typeof__(&name) p_##name = (__typeof__(&name))find(library, #name)
	LOAD(cuInit);
	LOAD(cuDriverGetVersion);
	LOAD(cuDeviceGetName);
	LOAD(cuCtxSetCurrent);
	LOAD(cuMemAlloc);
	LOAD(cuDevicePrimaryCtxRetain);
	LOAD(cuStreamCreate);
	LOAD(cuModuleLoadData);
	LOAD(cuModuleGetFunction);
	char name[128] = "";
	CUcontext context;
	CUmodule module;
	int version;

	settle = (__typeof__(settle))find(library, "cuStreamSynchronize");
	if (p_cuInit(0) || p_cuDevicePrimaryCtxRetain(&context, 0) || p_cuCtxSetCurrent(context) ||
	    p_cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) || p_cuDriverGetVersion(&version) ||
	    p_cuDeviceGetName(name, sizeof(name), 0))
		fail("no context");
	for (int i = 0; i < PIECES; i++)
		if (p_cuMemAlloc(&pieces[i], PIECE_BYTES))
			fail("no memory");
	if (p_cuModuleLoadData(&module, image) || p_cuModuleGetFunction(&nothing, module, "nothing") ||
	    p_cuModuleGetFunction(&eight, module, "eight"))
		fail("the kernels cannot be loaded");
	printf("ready %d %s\n", version, name);
}

int main(int count, char **given)
{
	const char *path = getenv("MPSD_REAL_LIBCUDA");
	struct api apis[2];
	void *library, *real;
	long calls;
	char line[16];

	if (count != 4)
		fail("CALLS IMAGE REFUSED");
	setvbuf(stdout, NULL, _IOLBF, 0);
	calls = atol(given[1]);
	library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!library)
		fail("no libcuda.so.1");
	prepare(library, read_image(given[2]));
	real = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : library;
	if (!real)
		fail(path);
	fill(&apis[0], library);
	fill(&apis[1], real);
	launch(&apis[0], LAUNCHES);
	while (fgets(line, sizeof(line), stdin)) {
		compare("cuCtxGetCurrent", context, apis, calls);
		compare("cuStreamQuery", query, apis, calls / 10);
		compare("cuStreamGetPriority", get_priority, apis, calls);
		if (atoi(given[3]))
			compare("cuLaunchKernel-refused", refused, apis, calls);
		compare("cuLaunchKernel", launch, apis, calls / 50);
		compare(TOKEN, token, apis, calls / 10000);
		printf("\n");
	}
	return 0;
}
