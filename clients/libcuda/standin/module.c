// SPDX-License-Identifier: MIT
/* Modules. A library is a module here, and a kernel is its function, as far as a program can tell. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "module.h"

#define MOST_TEXT 4096		/* of a file */

static struct CUmod_st *modules;

void close_modules(CUdevice device)
{
	struct CUmod_st **link = &modules, *module;

	while ((module = *link)) {
		if (module->device != device) {
			link = &module->next;
			continue;
		}
		*link = module->next;
		free_module(module);
	}
}

static struct CUmod_st *find_module(const struct CUmod_st *handle)
{
	struct CUmod_st *module = modules;

	must_live(handle);
	while (module && module != handle)
		module = module->next;
	return module;
}

struct CUfunc_st *find_function(const struct CUfunc_st *handle)
{
	must_live(handle);
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
	is_new(made);
	result = read_image(made, image);
	if (result != CUDA_SUCCESS) {
		free_module(made);
		return leave(result);
	}
	made->device = context->device;
	made->next = modules;
	modules = made;
	*module = made;
	leave(CUDA_SUCCESS);
	gate_keep(GATE_MODULE);
	return CUDA_SUCCESS;
}

API CUresult cuModuleLoad(CUmodule *module, const char *fname)
{
	char text[MOST_TEXT + 1] = "";
	FILE *file = fname ? fopen(fname, "re") : NULL;

	if (!file)
		return CUDA_ERROR_FILE_NOT_FOUND;
	text[fread(text, 1, MOST_TEXT, file)] = 0;
	fclose(file);
	return cuModuleLoadData(module, text);
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
	result = refuse_in_capture(context, false);
	if (result == CUDA_SUCCESS)
		result = wait_for_all(context);
	while (*link && *link != hmod)
		link = &(*link)->next;
	if (result != CUDA_SUCCESS || !*link)
		return leave(result ? result : CUDA_ERROR_INVALID_HANDLE);
	*link = hmod->next;
	free_module(hmod);
	leave(CUDA_SUCCESS);
	gate_keep(GATE_UNLOAD);
	return CUDA_SUCCESS;
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

API CUresult cuFuncGetName(const char **name, CUfunction hfunc)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!name || !find_function(hfunc))
		return leave(name ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE);
	*name = hfunc->name;
	return leave(CUDA_SUCCESS);
}

API CUresult cuKernelGetName(const char **name, CUkernel kernel)
{
	return cuFuncGetName(name, (CUfunction)kernel);
}

API CUresult cuFuncGetModule(CUmodule *hmod, CUfunction hfunc)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!hmod || !find_function(hfunc))
		return leave(hmod ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE);
	*hmod = hfunc->module;
	return leave(CUDA_SUCCESS);
}

API CUresult cuModuleGetFunctionCount(unsigned int *count, CUmodule mod)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!count || !find_module(mod))
		return leave(count ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE);
	*count = 0;
	for (struct CUfunc_st *function = mod->functions; function; function = function->next)
		++*count;
	return leave(CUDA_SUCCESS);
}

API CUresult cuModuleEnumerateFunctions(CUfunction *functions, unsigned int numFunctions, CUmodule mod)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!functions || !find_module(mod))
		return leave(functions ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE);
	for (struct CUfunc_st *function = mod->functions; function && numFunctions--; function = function->next)
		*functions++ = function;
	return leave(CUDA_SUCCESS);
}

API CUresult cuLibraryGetKernelCount(unsigned int *count, CUlibrary lib)
{
	return cuModuleGetFunctionCount(count, (CUmodule)lib);
}

API CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int numKernels, CUlibrary lib)
{
	return cuModuleEnumerateFunctions((CUfunction *)kernels, numKernels, (CUmodule)lib);
}

/* As the private tables of the driver do: by a way that nobody can follow. */
static CUresult find_privately(CUfunction *function, CUmodule module, const char *name)
{
	return cuModuleGetFunction(function, module, name);
}

const struct standin_table standin_table = { sizeof(standin_table), find_privately };

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

API CUresult cuLibraryGetModule(CUmodule *pMod, CUlibrary library)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!pMod)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*pMod = find_module((CUmodule)library);
	return leave(*pMod ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

API CUresult cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name)
{
	CUresult result = cuModuleGetFunction((CUfunction *)pKernel, (CUmodule)library, name);

	gate_keep(GATE_KERNEL);
	return result;
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
		return leave(pFunc ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE);
	*pFunc = (CUfunction)kernel;
	return leave(CUDA_SUCCESS);
}
