// SPDX-License-Identifier: MIT
/* What the program has made, made again in the standby's copy of the driver. */
#include "failover/made.h"

static CUresult make_context(struct mpsd_made *made)
{
	CUcontext context;
	CUresult result = other_cuDevicePrimaryCtxRetain(&context, made->device);

	made->twin = context;
	return result;
}

static CUresult load_module(struct mpsd_made *made)
{
	const CUjit_option *names;
	void **values;
	unsigned int options;

	if (!made->image && !made->text)
		return CUDA_ERROR_INVALID_IMAGE;
	if (!made->image)
		return other_cuModuleLoad((CUmodule *)&made->twin, made->text);
	options = mpsd_image_options(made->image, &names, &values);
	return other_cuModuleLoadDataEx((CUmodule *)&made->twin, mpsd_image_data(made->image), options,
					(CUjit_option *)names, values);
}

static CUresult load_library(struct mpsd_made *made)
{
	const CUjit_option *names;
	void **values;
	unsigned int options;

	if (!made->image)
		return CUDA_ERROR_INVALID_IMAGE;
	options = mpsd_image_options(made->image, &names, &values);
	return other_cuLibraryLoadData((CUlibrary *)&made->twin, mpsd_image_data(made->image),
				       (CUjit_option *)names, values, options, NULL, NULL, 0);
}

static CUresult make(struct mpsd_made *made, const char **what)
{
	void *of = made->of ? made->of->twin : NULL;

#define TRY(function, ...) (*what = #function, other_##function(__VA_ARGS__))
	switch (made->kind) {
	case MPSD_MADE_CONTEXT:
		*what = "cuDevicePrimaryCtxRetain";
		return make_context(made);
	case MPSD_MADE_STREAM:
		return TRY(cuStreamCreateWithPriority, (CUstream *)&made->twin, made->flags, made->value);
	case MPSD_MADE_EVENT:
		return TRY(cuEventCreate, (CUevent *)&made->twin, made->flags);
	case MPSD_MADE_MODULE:
		*what = "cuModuleLoadData";
		return load_module(made);
	case MPSD_MADE_LIBRARY:
		*what = "cuLibraryLoadData";
		return load_library(made);
	case MPSD_MADE_LIBRARY_MODULE:
		return TRY(cuLibraryGetModule, (CUmodule *)&made->twin, of);
	case MPSD_MADE_FUNCTION:
		return TRY(cuModuleGetFunction, (CUfunction *)&made->twin, of, made->text);
	case MPSD_MADE_KERNEL:
		return TRY(cuLibraryGetKernel, (CUkernel *)&made->twin, of, made->text);
	case MPSD_MADE_KERNEL_FUNCTION:
		return TRY(cuKernelGetFunction, (CUfunction *)&made->twin, of);
	case MPSD_MADE_HOST:
		made->twin = made->name;
		return TRY(cuMemHostRegister_v2, made->name, made->size, made->flags);
	case MPSD_MADE_LIMIT:
		return TRY(cuCtxSetLimit, (CUlimit)made->what, made->size);
	case MPSD_MADE_FUNCTION_ATTRIBUTE:
		return TRY(cuFuncSetAttribute, of, (CUfunction_attribute)made->what, made->value);
	case MPSD_MADE_KERNEL_ATTRIBUTE:
		return TRY(cuKernelSetAttribute, (CUfunction_attribute)made->what, made->value, of, made->device);
	case MPSD_MADE_FUNCTION_CACHE:
		return TRY(cuFuncSetCacheConfig, of, (CUfunc_cache)made->value);
	case MPSD_MADE_KERNEL_CACHE:
		return TRY(cuKernelSetCacheConfig, of, (CUfunc_cache)made->value, made->device);
	case MPSD_MADE_CONTEXT_CACHE:
		return TRY(cuCtxSetCacheConfig, (CUfunc_cache)made->value);
	case MPSD_MADE_GRAPH:
	case MPSD_MADE_EXEC:
		made->twin = NULL;
		return CUDA_SUCCESS;
	case MPSD_MADE_PRIMARY_FLAGS:
		return TRY(cuDevicePrimaryCtxSetFlags_v2, made->device, (unsigned int)made->value);
	}
#undef TRY
	*what = "an unknown record";
	return CUDA_ERROR_INVALID_VALUE;
}

bool mpsd_twin_make(struct mpsd_made *made, const char **what)
{
	struct mpsd_made *context = made->device >= 0 ? mpsd_made_context(made->device) : NULL;

	if (made->kind != MPSD_MADE_CONTEXT && context && context->is_twin)
		other_cuCtxSetCurrent(context->twin);
	return make(made, what) == CUDA_SUCCESS;
}
