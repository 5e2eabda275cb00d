// SPDX-License-Identifier: MIT
/* make_NAME() of carry.toml: each makes its thing in the copy in use, and a record of how. */
#include "failover/made.h"

#include <stdlib.h>
#include <string.h>

#include "exact/params.h"
#include "exact/shapes.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "failover/pools.h"

CUdevice mpsd_current_device(void)
{
	CUdevice device = 0;

	return real_cuCtxGetDevice(&device) == CUDA_SUCCESS ? device : -1;
}

static uint64_t moves_now(void)
{
	return mpsd_tables()->moves;
}

/* `handle`: where the driver has put it, and where the program looks for its name. */
static CUresult note(CUresult result, struct mpsd_made record, void **handle, uint64_t moves)
{
	if (result != CUDA_SUCCESS)
		return result;
	record.native = *handle;
	if (!mpsd_made_add(&record, moves)) {
		free(record.text);
		return MPSD_AGAIN;
	}
	*handle = record.name;
	return result;
}

static CUresult note_setting(CUresult result, struct mpsd_made record, uint64_t moves)
{
	if (result != CUDA_SUCCESS)
		return result;
	if (!record.of && record.kind >= MPSD_MADE_FUNCTION_ATTRIBUTE && record.kind <= MPSD_MADE_KERNEL_CACHE)
		return mpsd_line_made(result, "a function from an untracked API call");
	return mpsd_made_set(&record, moves) ? result : MPSD_AGAIN;
}

struct mpsd_made *mpsd_made_known(const void *name)
{
	struct mpsd_made *made;

	mpsd_made_lock();
	made = mpsd_made_find(name);
	mpsd_made_unlock();
	return made;
}

/* Contexts */

CUresult make_cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
	struct mpsd_made record = { .kind = MPSD_MADE_CONTEXT, .device = dev };
	uint64_t moves = moves_now();
	CUresult result = note(inner_cuDevicePrimaryCtxRetain(pctx, dev), record, (void **)pctx, moves);
	struct mpsd_made *made;
	int contexts = 0;

	if (result != CUDA_SUCCESS)
		return result;
	mpsd_made_lock();
	made = mpsd_made_find(*pctx);
	if (made)
		made->flags++;
	for (made = mpsd_made_oldest(); made; made = made->newer)
		contexts += made->kind == MPSD_MADE_CONTEXT;
	mpsd_made_unlock();
	if (contexts > 1)
		mpsd_work_several();
	mpsd_line_start();
	mpsd_line_wake();
	return result;
}

/* All that was in it has ended too. Programs do so when they end, and hardly ever go on. */
static CUresult context_ended(CUresult result, CUdevice dev, bool all)
{
	static const char ended[] = "the end of a primary context";
	bool is, is_new = false;
	struct mpsd_made *made;

	if (result != CUDA_SUCCESS)
		return result;
	mpsd_made_lock();
	if (mpsd_is_left()) {
		mpsd_made_unlock();
		return MPSD_AGAIN;
	}
	made = mpsd_made_context(dev);
	is = made && (all || made->flags <= 1);
	if (made && made->flags)
		made->flags--;
	if (is)
		is_new = mpsd_opaque_note(ended);
	mpsd_made_unlock();
	if (is)
		mpsd_own_context_ended();
	if (is_new)
		mpsd_opaque_noted(ended);
	return result;
}

CUresult end_cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
	return context_ended(inner_cuDevicePrimaryCtxRelease_v2(dev), dev, false);
}

CUresult end_cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
	return context_ended(inner_cuDevicePrimaryCtxReset_v2(dev), dev, true);
}

CUresult make_cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags)
{
	struct mpsd_made record = { .kind = MPSD_MADE_PRIMARY_FLAGS, .device = dev, .value = (int)flags };

	return note_setting(inner_cuDevicePrimaryCtxSetFlags_v2(dev, flags), record, moves_now());
}

CUresult make_cuCtxSetLimit(CUlimit limit, size_t value)
{
	struct mpsd_made record = { .kind = MPSD_MADE_LIMIT, .device = mpsd_current_device(), .what = (int)limit,
				    .size = value };

	return note_setting(inner_cuCtxSetLimit(limit, value), record, moves_now());
}

CUresult make_cuCtxSetCacheConfig(CUfunc_cache config)
{
	struct mpsd_made record = { .kind = MPSD_MADE_CONTEXT_CACHE, .device = mpsd_current_device(),
				    .value = (int)config };

	return note_setting(inner_cuCtxSetCacheConfig(config), record, moves_now());
}

/* Streams and events */

CUresult make_cuStreamCreate(CUstream *phStream, unsigned int Flags)
{
	struct mpsd_made record = { .kind = MPSD_MADE_STREAM, .device = mpsd_current_device(), .flags = Flags };
	uint64_t moves = moves_now();

	return note(inner_cuStreamCreate(phStream, Flags), record, (void **)phStream, moves);
}

CUresult make_cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority)
{
	struct mpsd_made record = { .kind = MPSD_MADE_STREAM, .device = mpsd_current_device(), .flags = flags,
				    .value = priority };
	uint64_t moves = moves_now();

	return note(inner_cuStreamCreateWithPriority(phStream, flags, priority), record, (void **)phStream, moves);
}

CUresult make_cuEventCreate(CUevent *phEvent, unsigned int Flags)
{
	struct mpsd_made record = { .kind = MPSD_MADE_EVENT, .device = mpsd_current_device(), .flags = Flags };
	uint64_t moves = moves_now();

	return note(inner_cuEventCreate(phEvent, Flags), record, (void **)phEvent, moves);
}

/*
 * The record goes first, so that the address of what has ended is nobody's when the driver gives it again. A graph that
 * was not needed in this copy yet has nothing here to be ended.
 */
#define END(function, type, may_end)						\
	CUresult end_##function(type handle)					\
	{									\
		uint64_t moves = moves_now();					\
		type native = mpsd_native(handle);				\
										\
		if (!mpsd_made_end(handle, moves))				\
			return MPSD_AGAIN;					\
		if ((handle && !native) || !may_end(handle, native, moves))	\
			return mpsd_made_ended(CUDA_SUCCESS, moves);		\
		return mpsd_made_ended(inner_##function(native), moves);	\
	}

#define AT_ONCE(handle, native, moves) true
#define NO_EVENT(handle, native, moves) (mpsd_captures_without_event(handle), true)
#define NOT_CAPTURED(handle, native, moves)	\
	(mpsd_captures_without(handle), mpsd_pools_without(handle, native), mpsd_asked_ends(native, moves))
/* Their functions' handles may come again, with other parameters. */
#define FORGOTTEN(handle, native, moves) (mpsd_params_forget(), mpsd_asked_ends(native, moves))

END(cuStreamDestroy_v2, CUstream, NOT_CAPTURED)
END(cuEventDestroy_v2, CUevent, NO_EVENT)
END(cuModuleUnload, CUmodule, FORGOTTEN)
END(cuLibraryUnload, CUlibrary, FORGOTTEN)
END(cuGraphDestroy, CUgraph, AT_ONCE)
END(cuLinkDestroy, CUlinkState, AT_ONCE)

/* Code */

static CUresult note_image(CUresult result, enum mpsd_made_kind kind, void **handle, struct mpsd_image *image,
			   uint64_t moves)
{
	struct mpsd_made record = { .kind = kind, .device = mpsd_current_device(), .image = image };

	if (result == CUDA_SUCCESS && !image)
		mpsd_line_opaque("a code image of unknown size");
	result = note(result, record, handle, moves);
	if (result != CUDA_SUCCESS)
		mpsd_image_free(image);
	return result;
}

CUresult make_cuModuleLoadData(CUmodule *module, const void *image)
{
	struct mpsd_image *kept = mpsd_image_keep(image, 0, NULL, NULL);
	uint64_t moves = moves_now();

	return note_image(inner_cuModuleLoadData(module, image), MPSD_MADE_MODULE, (void **)module, kept, moves);
}

CUresult make_cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int numOptions,
				 CUjit_option *options, void **optionValues)
{
	struct mpsd_image *kept = mpsd_image_keep(image, numOptions, options, optionValues);
	uint64_t moves = moves_now();

	return note_image(inner_cuModuleLoadDataEx(module, image, numOptions, options, optionValues),
			  MPSD_MADE_MODULE, (void **)module, kept, moves);
}

CUresult make_cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin)
{
	struct mpsd_image *kept = mpsd_image_keep(fatCubin, 0, NULL, NULL);
	uint64_t moves = moves_now();

	return note_image(inner_cuModuleLoadFatBinary(module, fatCubin), MPSD_MADE_MODULE, (void **)module, kept,
			  moves);
}

CUresult make_cuModuleLoad(CUmodule *module, const char *fname)
{
	struct mpsd_image *kept = mpsd_image_read(fname);
	uint64_t moves = moves_now();

	return note_image(inner_cuModuleLoad(module, fname), MPSD_MADE_MODULE, (void **)module, kept, moves);
}

CUresult make_cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jitOptions,
				void **jitOptionsValues, unsigned int numJitOptions,
				CUlibraryOption *libraryOptions, void **libraryOptionValues,
				unsigned int numLibraryOptions)
{
	struct mpsd_image *kept = mpsd_image_keep(code, numJitOptions, jitOptions, jitOptionsValues);
	uint64_t moves = moves_now();

	return note_image(inner_cuLibraryLoadData(library, code, jitOptions, jitOptionsValues, numJitOptions,
						  libraryOptions, libraryOptionValues, numLibraryOptions),
			  MPSD_MADE_LIBRARY, (void **)library, kept, moves);
}

static CUresult note_one(CUresult result, struct mpsd_made record, const void *of, const char *name, void **handle,
			 uint64_t moves)
{
	record.device = mpsd_current_device();
	record.of = mpsd_made_known(of);
	if (result != CUDA_SUCCESS)
		return result;
	/* Of something that came by a way that is not followed, which was said then. */
	if (!record.of)
		return result;
	record.text = name ? strdup(name) : NULL;
	return note(result, record, handle, moves);
}

static CUresult note_part(CUresult result, enum mpsd_made_kind kind, const void *of, const char *name,
			  void **handle, uint64_t moves)
{
	return note_one(result, (struct mpsd_made){ .kind = kind }, of, name, handle, moves);
}

CUresult make_cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name)
{
	uint64_t moves = moves_now();

	return note_part(inner_cuModuleGetFunction(hfunc, mpsd_native(hmod), name), MPSD_MADE_FUNCTION, hmod, name,
			 (void **)hfunc, moves);
}

CUresult make_cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name)
{
	uint64_t moves = moves_now();

	return note_part(inner_cuLibraryGetKernel(pKernel, mpsd_native(library), name), MPSD_MADE_KERNEL, library,
			 name, (void **)pKernel, moves);
}

CUresult make_cuLibraryGetModule(CUmodule *pMod, CUlibrary library)
{
	uint64_t moves = moves_now();

	return note_part(inner_cuLibraryGetModule(pMod, mpsd_native(library)), MPSD_MADE_LIBRARY_MODULE, library,
			 NULL, (void **)pMod, moves);
}

CUresult make_cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel)
{
	uint64_t moves = moves_now();

	return note_part(inner_cuKernelGetFunction(pFunc, mpsd_native(kernel)), MPSD_MADE_KERNEL_FUNCTION, kernel,
			 NULL, (void **)pFunc, moves);
}

/* Lists of all that is in a module, which say no names: the driver does. */

static CUresult note_listed(CUresult result, enum mpsd_made_kind kind, const void *of, const char *name,
			    void **handle, uint64_t moves)
{
	if (result == CUDA_SUCCESS && name)
		return note_one(result, (struct mpsd_made){ .kind = kind, .listed = true }, of, name, handle, moves);
	return mpsd_is_loss(result) ? result
				    : mpsd_line_made(CUDA_SUCCESS, "a list of functions with unknown names");
}

CUresult make_cuModuleEnumerateFunctions(CUfunction *functions, unsigned int numFunctions, CUmodule mod)
{
	uint64_t moves = moves_now();
	unsigned int there = 0;
	CUresult result = real_cuModuleGetFunctionCount(&there, mpsd_native(mod));

	if (result == CUDA_SUCCESS)
		result = inner_cuModuleEnumerateFunctions(functions, numFunctions, mpsd_native(mod));
	for (unsigned int i = 0; result == CUDA_SUCCESS && i < numFunctions && i < there; i++) {
		const char *name = NULL;

		result = real_cuFuncGetName(&name, functions[i]);
		result = note_listed(result, MPSD_MADE_FUNCTION, mod, name, (void **)&functions[i], moves);
	}
	return result;
}

CUresult make_cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int numKernels, CUlibrary lib)
{
	uint64_t moves = moves_now();
	unsigned int there = 0;
	CUresult result = real_cuLibraryGetKernelCount(&there, mpsd_native(lib));

	if (result == CUDA_SUCCESS)
		result = inner_cuLibraryEnumerateKernels(kernels, numKernels, mpsd_native(lib));
	for (unsigned int i = 0; result == CUDA_SUCCESS && i < numKernels && i < there; i++) {
		const char *name = NULL;

		result = real_cuKernelGetName(&name, kernels[i]);
		result = note_listed(result, MPSD_MADE_KERNEL, lib, name, (void **)&kernels[i], moves);
	}
	return result;
}

CUresult make_cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value)
{
	struct mpsd_made record = { .kind = MPSD_MADE_FUNCTION_ATTRIBUTE, .of = mpsd_made_learn(hfunc),
				    .device = mpsd_current_device(), .what = (int)attrib, .value = value };

	mpsd_shapes_forget(hfunc);
	return note_setting(inner_cuFuncSetAttribute(mpsd_native(hfunc), attrib, value), record, moves_now());
}

CUresult make_cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache config)
{
	struct mpsd_made record = { .kind = MPSD_MADE_FUNCTION_CACHE, .of = mpsd_made_learn(hfunc),
				    .device = mpsd_current_device(), .value = (int)config };

	return note_setting(inner_cuFuncSetCacheConfig(mpsd_native(hfunc), config), record, moves_now());
}

CUresult make_cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev)
{
	struct mpsd_made record = { .kind = MPSD_MADE_KERNEL_ATTRIBUTE, .of = mpsd_made_known(kernel), .device = dev,
				    .what = (int)attrib, .value = val };

	mpsd_shapes_forget((CUfunction)kernel);
	return note_setting(inner_cuKernelSetAttribute(attrib, val, mpsd_native(kernel), dev), record, moves_now());
}

CUresult make_cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice dev)
{
	struct mpsd_made record = { .kind = MPSD_MADE_KERNEL_CACHE, .of = mpsd_made_known(kernel), .device = dev,
				    .value = (int)config };

	return note_setting(inner_cuKernelSetCacheConfig(mpsd_native(kernel), config, dev), record, moves_now());
}
