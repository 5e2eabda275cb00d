/* SPDX-License-Identifier: MIT */
/*
 * CU(cuMemAlloc)(...) calls a driver function, found as the program was told or built: linked directly (-DDIRECT), by
 * dlsym, or by cuGetProcAddress.
 */
#pragma once

#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPANDED(name) #name
#define SYMBOL(name) EXPANDED(name)

#ifdef DIRECT
#define CU(name) name
#else
#define CU(name) ((__typeof__(&name))driver_function(SYMBOL(name), #name))
#endif

static void *driver_handle;
static int driver_by_getproc;

static inline void driver_open(const char *how, const char *path)
{
	driver_by_getproc = !strcmp(how, "getproc");
#ifndef DIRECT
	driver_handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!driver_handle) {
		fprintf(stderr, "%s\n", dlerror());
		exit(9);
	}
#else
	(void)path;
#endif
}

static inline void *driver_function(const char *symbol, const char *plain)
{
	CUresult (*getproc)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
	void *found = NULL;

	if (!driver_by_getproc) {
		found = dlsym(driver_handle, symbol);
	} else {
		getproc = (__typeof__(getproc))dlsym(driver_handle, "cuGetProcAddress_v2");
		if (!getproc || getproc(plain, &found, 12040, 0, NULL))
			found = NULL;
	}
	if (!found) {
		fprintf(stderr, "%s not found\n", symbol);
		exit(8);
	}
	return found;
}
