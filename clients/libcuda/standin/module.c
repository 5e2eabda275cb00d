// SPDX-License-Identifier: MIT
/*
 * Modules. An image is a text:
 *
 *	standin module
 *	kernel NAME FUNCTION MICROSECONDS
 *	global NAME BYTES
 *
 * or has one in it, up to an empty line, be it PTX, an ELF file or a fat binary: the rest is not looked at. The one kernel
 * that the proxy itself brings is known by its name.
 *
 * A library is a module here, and a kernel is its function, as far as a program can tell.
 */
#include <elf.h>
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
	CUdevice device;
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
	is_new(function);
	function->duration_ns = (uint64_t)microseconds * 1000;
	function->module = module;
	start_attributes(function);
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

uintptr_t first_global(const struct CUfunc_st *function)
{
	const struct global *global = function->module->globals;

	while (global && global->next)
		global = global->next;
	return global ? global->address : 0;
}

static void free_module(struct CUmod_st *module)
{
	struct CUfunc_st *function;
	struct global *global;

	while ((function = module->functions)) {
		module->functions = function->next;
		is_gone(function);
		free(function);
	}
	while ((global = module->globals)) {
		module->globals = global->next;
		device_free(global->address);
		free(global);
	}
	is_gone(module);
	free(module);
}

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

/* elf(5), and the head of a fat binary: magic, version, its own size, that of what follows. */
static size_t bytes_of(const char *image)
{
	uint16_t head_bytes;
	uint64_t bytes;

	if (!strncmp(image, "\x50\xed\x55\xba", 4)) {
		memcpy(&head_bytes, image + 6, sizeof(head_bytes));
		memcpy(&bytes, image + 8, sizeof(bytes));
		return head_bytes + bytes;
	}
	if (!strncmp(image, ELFMAG, SELFMAG)) {
		const Elf64_Ehdr *head = (const Elf64_Ehdr *)image;

		return head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
	}
	return strlen(image);
}

static CUresult read_image(struct CUmod_st *module, const char *image)
{
	CUresult result = CUDA_SUCCESS;

	if (!strncmp(image, ".version", 8) && strstr(image, ".entry mpsd_page_sums("))
		return add_kernel(module, "kernel mpsd_page_sums page_sums 0");
	image = memmem(image, bytes_of(image), MARK, strlen(MARK));
	if (!image)
		return CUDA_ERROR_INVALID_IMAGE;
	image += strlen(MARK);
	while (*image && *image != '\n' && result == CUDA_SUCCESS) {
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
