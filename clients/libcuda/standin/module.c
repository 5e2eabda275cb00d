// SPDX-License-Identifier: MIT
/*
 * Modules. An image is a text:
 *
 *	standin module
 *	kernel NAME FUNCTION MICROSECONDS
 *	global NAME BYTES
 *
 * A library is a module here, and a kernel is its function, as far as a program can tell.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

#define MARK "standin module\n"

struct global {
	struct global *next;
	char name[64];
	uintptr_t address;
	size_t size;
};

struct CUmod_st {
	struct CUmod_st *next;
	struct CUfunc_st *functions;
	struct global *globals;
};

static struct CUmod_st *modules;

static CUresult add_kernel(struct CUmod_st *module, const char *line)
{
	struct CUfunc_st *function = calloc(1, sizeof(*function));
	unsigned int microseconds;
	char builtin[64];

	if (!function)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (sscanf(line, "kernel %63s %63s %u", function->name, builtin, &microseconds) == 3)
		function->builtin = find_builtin(builtin);
	if (!function->builtin) {
		free(function);
		return CUDA_ERROR_INVALID_IMAGE;
	}
	function->duration_ns = (uint64_t)microseconds * 1000;
	function->module = module;
	function->next = module->functions;
	module->functions = function;
	return CUDA_SUCCESS;
}

static CUresult add_global(struct CUmod_st *module, const char *line)
{
	struct global *global = calloc(1, sizeof(*global));
	CUresult result = CUDA_ERROR_INVALID_IMAGE;

	if (!global)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (sscanf(line, "global %63s %zu", global->name, &global->size) == 2 && global->size)
		result = device_alloc(&global->address, global->size);
	if (result != CUDA_SUCCESS) {
		free(global);
		return result;
	}
	global->next = module->globals;
	module->globals = global;
	return CUDA_SUCCESS;
}

static void free_module(struct CUmod_st *module)
{
	struct CUfunc_st *function;
	struct global *global;

	while ((function = module->functions)) {
		module->functions = function->next;
		free(function);
	}
	while ((global = module->globals)) {
		module->globals = global->next;
		device_free(global->address);
		free(global);
	}
	free(module);
}

static CUresult read_image(struct CUmod_st *module, const char *image)
{
	CUresult result = CUDA_SUCCESS;

	if (strncmp(image, MARK, strlen(MARK)) != 0)
		return CUDA_ERROR_INVALID_IMAGE;
	image += strlen(MARK);
	while (*image && result == CUDA_SUCCESS) {
		const char *end = strchrnul(image, '\n');

		if (!strncmp(image, "kernel ", 7))
			result = add_kernel(module, image);
		else if (!strncmp(image, "global ", 7))
			result = add_global(module, image);
		else if (end != image)
			result = CUDA_ERROR_INVALID_IMAGE;
		image = *end ? end + 1 : end;
	}
	return result;
}

static struct CUmod_st *find_module(const struct CUmod_st *handle)
{
	struct CUmod_st *module = modules;

	while (module && module != handle)
		module = module->next;
	return module;
}

static struct CUfunc_st *find_function(const struct CUfunc_st *handle)
{
	for (struct CUmod_st *module = modules; module; module = module->next)
		for (struct CUfunc_st *function = module->functions; function; function = function->next)
			if (function == handle)
				return function;
	return NULL;
}

API CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
	struct CUmod_st *made;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!module || !image)
		return leave(CUDA_ERROR_INVALID_VALUE);
	made = calloc(1, sizeof(*made));
	if (!made)
		return leave(CUDA_ERROR_OUT_OF_MEMORY);
	result = read_image(made, image);
	if (result != CUDA_SUCCESS) {
		free_module(made);
		return leave(result);
	}
	made->next = modules;
	modules = made;
	*module = made;
	return leave(CUDA_SUCCESS);
}

API CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int numOptions,
				CUjit_option *options, void **optionValues)
{
	(void)numOptions;
	(void)options;
	(void)optionValues;
	return cuModuleLoadData(module, image);
}

API CUresult cuModuleUnload(CUmodule hmod)
{
	struct CUmod_st **link = &modules;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!hmod || !find_module(hmod))
		return leave(CUDA_ERROR_INVALID_HANDLE);
	result = wait_for_all(context);
	while (*link && *link != hmod)
		link = &(*link)->next;
	if (result != CUDA_SUCCESS || !*link)
		return leave(result ? result : CUDA_ERROR_INVALID_HANDLE);
	*link = hmod->next;
	free_module(hmod);
	return leave(CUDA_SUCCESS);
}

API CUresult cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name)
{
	struct CUfunc_st *function;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!hfunc || !name || !hmod || !find_module(hmod))
		return leave(hfunc && name ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE);
	for (function = hmod->functions; function && strcmp(function->name, name) != 0;)
		function = function->next;
	*hfunc = function;
	return leave(function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND);
}

API CUresult cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule hmod, const char *name)
{
	struct global *global;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!name || !hmod || !find_module(hmod))
		return leave(name ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE);
	for (global = hmod->globals; global && strcmp(global->name, name) != 0;)
		global = global->next;
	if (!global)
		return leave(CUDA_ERROR_NOT_FOUND);
	if (dptr)
		*dptr = global->address;
	if (bytes)
		*bytes = global->size;
	return leave(CUDA_SUCCESS);
}

API CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
	if (!mode)
		return CUDA_ERROR_INVALID_VALUE;
	*mode = CU_MODULE_LAZY_LOADING;
	return CUDA_SUCCESS;
}

API CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jitOptions,
			       void **jitOptionsValues, unsigned int numJitOptions, CUlibraryOption *libraryOptions,
			       void **libraryOptionValues, unsigned int numLibraryOptions)
{
	(void)jitOptions;
	(void)jitOptionsValues;
	(void)numJitOptions;
	(void)libraryOptions;
	(void)libraryOptionValues;
	(void)numLibraryOptions;
	return cuModuleLoadData((CUmodule *)library, code);
}

API CUresult cuLibraryUnload(CUlibrary library)
{
	return cuModuleUnload((CUmodule)library);
}

API CUresult cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name)
{
	return cuModuleGetFunction((CUfunction *)pKernel, (CUmodule)library, name);
}

API CUresult cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)
{
	return cuModuleGetGlobal_v2(dptr, bytes, (CUmodule)library, name);
}

API CUresult cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!pFunc || !find_function((CUfunction)kernel))
		return leave(CUDA_ERROR_INVALID_HANDLE);
	*pFunc = (CUfunction)kernel;
	return leave(CUDA_SUCCESS);
}

API CUresult cuFuncGetAttribute(int *pi, CUfunction_attribute attrib, CUfunction hfunc)
{
	struct CUfunc_st *function;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	function = find_function(hfunc);
	if (!pi || !function)
		return leave(pi ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE);
	switch (attrib) {
	case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
		*pi = 1024;
		break;
	case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
		*pi = function->shared_bytes;
		break;
	default:
		*pi = 0;
	}
	return leave(CUDA_SUCCESS);
}

API CUresult cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value)
{
	struct CUfunc_st *function;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	function = find_function(hfunc);
	if (!function)
		return leave(CUDA_ERROR_INVALID_HANDLE);
	if (attrib == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
		function->shared_bytes = value;
	return leave(CUDA_SUCCESS);
}

API CUresult cuKernelGetAttribute(int *pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev)
{
	return dev ? CUDA_ERROR_INVALID_DEVICE : cuFuncGetAttribute(pi, attrib, (CUfunction)kernel);
}

API CUresult cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev)
{
	return dev ? CUDA_ERROR_INVALID_DEVICE : cuFuncSetAttribute((CUfunction)kernel, attrib, val);
}

API CUresult cuFuncGetParamInfo(CUfunction func, size_t paramIndex, size_t *paramOffset, size_t *paramSize)
{
	struct CUfunc_st *function;
	CUcontext context;
	size_t offset = 0;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	function = find_function(func);
	if (!function || !paramOffset || paramIndex >= function->builtin->parameters)
		return leave(function ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE);
	for (size_t i = 0; i < paramIndex; i++)
		offset += function->builtin->sizes[i];
	*paramOffset = offset;
	if (paramSize)
		*paramSize = function->builtin->sizes[paramIndex];
	return leave(CUDA_SUCCESS);
}

static void run_kernel(struct operation *operation)
{
	operation->kernel.builtin->run(operation->kernel.arguments);
}

/* Parameters are copied now: the caller may change them as soon as the launch returns. */
API CUresult cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
			    unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
			    unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra)
{
	struct operation operation = { .run = run_kernel };
	struct CUfunc_st *function;
	CUcontext context;
	CUstream stream;
	CUresult result = enter(&context);

	(void)sharedMemBytes;
	if (result != CUDA_SUCCESS)
		return result;
	function = find_function(f);
	result = find_stream(context, hStream, &stream);
	if (!function || result != CUDA_SUCCESS)
		return leave(CUDA_ERROR_INVALID_HANDLE);
	if (extra || (function->builtin->parameters && !kernelParams) || !gridDimX || !gridDimY || !gridDimZ ||
	    !blockDimX || !blockDimY || !blockDimZ || blockDimX * blockDimY * blockDimZ > 1024)
		return leave(CUDA_ERROR_INVALID_VALUE);
	operation.duration_ns = function->duration_ns;
	operation.kernel.builtin = function->builtin;
	for (size_t i = 0; i < function->builtin->parameters; i++)
		memcpy(&operation.kernel.arguments[i], kernelParams[i], function->builtin->sizes[i]);
	return leave(submit(stream, &operation));
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)
{
	if (!config)
		return CUDA_ERROR_INVALID_VALUE;
	return cuLaunchKernel(f, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
			      config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->hStream,
			      kernelParams, extra);
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *numBlocks, CUfunction func, int blockSize,
								  size_t dynamicSMemSize, unsigned int flags)
{
	(void)func;
	(void)dynamicSMemSize;
	(void)flags;
	if (!numBlocks || blockSize <= 0)
		return CUDA_ERROR_INVALID_VALUE;
	*numBlocks = blockSize > 1024 ? 0 : 2048 / blockSize;
	return CUDA_SUCCESS;
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *numBlocks, CUfunction func, int blockSize,
							 size_t dynamicSMemSize)
{
	return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(numBlocks, func, blockSize, dynamicSMemSize, 0);
}

API CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t *dynamicSmemSize, CUfunction func, int numBlocks,
						     int blockSize)
{
	(void)func;
	if (!dynamicSmemSize || numBlocks <= 0 || blockSize <= 0)
		return CUDA_ERROR_INVALID_VALUE;
	*dynamicSmemSize = (size_t)(227 << 10) / (size_t)numBlocks;
	return CUDA_SUCCESS;
}

API CUresult cuOccupancyMaxActiveClusters(int *numClusters, CUfunction func, const CUlaunchConfig *config)
{
	(void)func;
	if (!numClusters || !config)
		return CUDA_ERROR_INVALID_VALUE;
	*numClusters = 16;
	return CUDA_SUCCESS;
}
