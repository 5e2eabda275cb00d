// SPDX-License-Identifier: MIT
/*
 * A library for LD_PRELOAD that shares a GPU in the way such libraries do: it has a dlsym() of its own, which answers
 * with its own functions for any library; it replaces answers of cuGetProcAddress; and it takes the driver's functions
 * from what dlopen("libcuda.so.1") finds. At the end it prints how often each function was called.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef cuGetProcAddress

/* A call that comes back to this library from below: the driver's function was this library's own. */
#define TOO_DEEP 20

typedef void *(*dlsym_function)(void *, const char *);

enum { INIT, ALLOC, FREE, LAUNCH, GETPROC, GETPROC_V2, HOOKS };

static const char *const names[HOOKS] = {
	"cuInit", "cuMemAlloc_v2", "cuMemFree_v2", "cuLaunchKernel", "cuGetProcAddress", "cuGetProcAddress_v2",
};
static void *driver[HOOKS];
static int counted[HOOKS];
static _Thread_local int depth;

static dlsym_function loader_dlsym(void)
{
	static dlsym_function found;

	if (!found)
		found = (dlsym_function)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
	if (!found)
		found = (dlsym_function)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
	if (!found)
		_Exit(76);
	return found;
}

static void *below(int hook)
{
	if (!driver[hook])
		driver[hook] = loader_dlsym()(dlopen("libcuda.so.1", RTLD_LAZY), names[hook]);
	if (!driver[hook] || depth > TOO_DEEP) {
		fprintf(stderr, "%s %s\n", names[hook], driver[hook] ? "calls itself" : "is missing");
		_Exit(77);
	}
	counted[hook]++;
	return driver[hook];
}

#define HOOK(hook, name, parameters, ...)							\
	CUresult name parameters								\
	{											\
		CUresult result;								\
												\
		depth++;									\
		result = ((CUresult (*) parameters)below(hook))(__VA_ARGS__);			\
		depth--;									\
		return result;									\
	}

HOOK(INIT, cuInit, (unsigned int flags), flags)
HOOK(ALLOC, cuMemAlloc_v2, (CUdeviceptr *to, size_t size), to, size)
HOOK(FREE, cuMemFree_v2, (CUdeviceptr from), from)
HOOK(LAUNCH, cuLaunchKernel,
     (CUfunction f, unsigned int x, unsigned int y, unsigned int z, unsigned int bx, unsigned int by, unsigned int bz,
      unsigned int shared, CUstream stream, void **params, void **extra),
     f, x, y, z, bx, by, bz, shared, stream, params, extra)

static void *own(const char *symbol);

/* By the plain names; of those that have versions the newest is wanted here. */
static void replace(CUresult result, const char *symbol, void **found)
{
	char versioned[64];

	if (result != CUDA_SUCCESS || !found || !*found)
		return;
	snprintf(versioned, sizeof(versioned), "%s_v2", symbol);
	if (own(versioned) || own(symbol))
		*found = own(versioned) ? own(versioned) : own(symbol);
}

CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int version, cuuint64_t flags,
			     CUdriverProcAddressQueryResult *status)
{
	__typeof__(&cuGetProcAddress_v2) real = (__typeof__(real))below(GETPROC_V2);
	CUresult result = real(symbol, pfn, version, flags, status);

	replace(result, symbol, pfn);
	return result;
}

CUresult cuGetProcAddress(const char *symbol, void **pfn, int version, cuuint64_t flags)
{
	CUresult (*real)(const char *, void **, int, cuuint64_t) = (__typeof__(real))below(GETPROC);
	CUresult result = real(symbol, pfn, version, flags);

	replace(result, symbol, pfn);
	return result;
}

static void *own(const char *symbol)
{
	static void *const functions[HOOKS] = {
		(void *)cuInit, (void *)cuMemAlloc_v2, (void *)cuMemFree_v2,
		(void *)cuLaunchKernel, (void *)cuGetProcAddress, (void *)cuGetProcAddress_v2,
	};

	for (int i = 0; i < HOOKS; i++)
		if (!strcmp(symbol, names[i]))
			return functions[i];
	return NULL;
}

void *dlsym(void *library, const char *symbol)
{
	void *found = library == RTLD_NEXT ? NULL : own(symbol);

	return found ? found : loader_dlsym()(library, symbol);
}

__attribute__((destructor)) static void tell(void)
{
	printf("preloaded:");
	for (int i = 0; i < HOOKS; i++)
		printf(" %s %d", names[i], counted[i]);
	puts("");
	fflush(stdout);
}
