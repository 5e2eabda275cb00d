// SPDX-License-Identifier: MIT
/* What the program has made, made again in the standby's copy of the driver. */
#include <sched.h>
#include <stdio.h>

#include "failover/ahead.h"
#include "failover/cost.h"
#include "failover/made.h"

#define MOST_YIELDS 1000

static CUresult make_context(struct mpsd_made *made)
{
	uint64_t before = mpsd_cost_free(made);
	CUcontext context;
	CUresult result = other_cuDevicePrimaryCtxRetain(&context, made->device);

	made->twin = context;
	if (result == CUDA_SUCCESS)
		mpsd_cost_took(made, before);
	return result;
}

static CUresult load_module(struct mpsd_made *made)
{
	const void *image = made->image ? mpsd_image_data(made->image) : NULL;
	const CUjit_option *names;
	void **values;
	unsigned int options;

	if (!image)
		return CUDA_ERROR_INVALID_IMAGE;
	options = mpsd_image_options(made->image, &names, &values);
	return other_cuModuleLoadDataEx((CUmodule *)&made->twin, image, options, (CUjit_option *)names, values);
}

static CUresult load_library(struct mpsd_made *made)
{
	const void *image = made->image ? mpsd_image_data(made->image) : NULL;
	const CUjit_option *names;
	void **values;
	unsigned int options;

	if (!image)
		return CUDA_ERROR_INVALID_IMAGE;
	options = mpsd_image_options(made->image, &names, &values);
	return other_cuLibraryLoadData((CUlibrary *)&made->twin, image, (CUjit_option *)names, values, options, NULL,
				       NULL, 0);
}

static CUresult find_variable(struct mpsd_made *made, const char **what)
{
	CUdeviceptr address = 0;
	CUresult result;
	size_t size = 0;

	*what = "cuModuleGetGlobal";
	if (made->of->kind == MPSD_MADE_LIBRARY)
		result = other_cuLibraryGetGlobal(&address, &size, made->of->twin, made->text);
	else
		result = other_cuModuleGetGlobal_v2(&address, &size, made->of->twin, made->text);
	made->twin = (void *)address;
	if (result == CUDA_SUCCESS && size != made->size)
		return CUDA_ERROR_INVALID_IMAGE;
	return result == CUDA_SUCCESS ? mpsd_variable_fill(made->name, address) : result;
}

/*
 * What the program has asked for by its name it uses: where functions are loaded when they are first launched, it would
 * wait for each of them after a move. One that cannot be loaded now is loaded then.
 */
static CUresult load_function(CUresult result, const struct mpsd_made *made)
{
	CUfunction function = made->twin;

	/* A standby that is made in the move has no time for that. */
	if (result != CUDA_SUCCESS || made->listed || atomic_load(&mpsd_moves) & 1 || !mpsd_other[MPSD_cuFuncLoad])
		return result;
	if (made->kind != MPSD_MADE_KERNEL || other_cuKernelGetFunction(&function, made->twin) == CUDA_SUCCESS)
		other_cuFuncLoad(function);
	return result;
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
		return load_function(TRY(cuModuleGetFunction, (CUfunction *)&made->twin, of, made->text), made);
	case MPSD_MADE_KERNEL:
		return load_function(TRY(cuLibraryGetKernel, (CUkernel *)&made->twin, of, made->text), made);
	case MPSD_MADE_KERNEL_FUNCTION:
		return load_function(TRY(cuKernelGetFunction, (CUfunction *)&made->twin, of), made);
	case MPSD_MADE_VARIABLE:
		return find_variable(made, what);
	case MPSD_MADE_HOST:
		made->twin = made->name;
		return TRY(cuMemHostRegister_v2, mpsd_made_pages(made->name), made->size, made->flags);
	case MPSD_MADE_LIMIT:
		return TRY(cuCtxSetLimit, (CUlimit)made->what, made->size);
	case MPSD_MADE_FUNCTION_ATTRIBUTE:
		/* A kernel passes for a function where it has been loaded, which its twin may not be. */
		if (made->of->kind == MPSD_MADE_KERNEL)
			return TRY(cuKernelSetAttribute, (CUfunction_attribute)made->what, made->value, of,
				   made->device);
		return TRY(cuFuncSetAttribute, of, (CUfunction_attribute)made->what, made->value);
	case MPSD_MADE_KERNEL_ATTRIBUTE:
		return TRY(cuKernelSetAttribute, (CUfunction_attribute)made->what, made->value, of, made->device);
	case MPSD_MADE_FUNCTION_CACHE:
		if (made->of->kind == MPSD_MADE_KERNEL)
			return TRY(cuKernelSetCacheConfig, of, (CUfunc_cache)made->value, made->device);
		return TRY(cuFuncSetCacheConfig, of, (CUfunc_cache)made->value);
	case MPSD_MADE_KERNEL_CACHE:
		return TRY(cuKernelSetCacheConfig, of, (CUfunc_cache)made->value, made->device);
	case MPSD_MADE_CONTEXT_CACHE:
		return TRY(cuCtxSetCacheConfig, (CUfunc_cache)made->value);
	case MPSD_MADE_GRAPH:
	case MPSD_MADE_EXEC:
	case MPSD_MADE_NODE:
	case MPSD_MADE_CONDITION:
	case MPSD_MADE_LINK:
		break;
	case MPSD_MADE_STREAM_ATTRIBUTE:
		return TRY(cuStreamSetAttribute, of, (CUstreamAttrID)made->what, made->attribute);
	case MPSD_MADE_PRIMARY_FLAGS:
		return TRY(cuDevicePrimaryCtxSetFlags_v2, made->device, (unsigned int)made->value);
	}
#undef TRY
	*what = "an unknown record";
	return CUDA_ERROR_INVALID_VALUE;
}

/* In this context of the standby's; NULL: it has none yet. */
static bool make_in(CUcontext context, struct mpsd_made *made, const char **what)
{
	static char said[160];	/* this thread's alone */
	CUresult result;

	if (context)
		other_cuCtxSetCurrent(context);
	result = make(made, what);
	if (result == CUDA_SUCCESS)
		return true;
	if (result == CUDA_ERROR_OUT_OF_MEMORY)
		atomic_store(&mpsd_cost_was_short, true);
	snprintf(said, sizeof(said), "%s: %d %.90s", *what, (int)result,
		 made->text ? made->text : made->of && made->of->text ? made->of->text : "");
	*what = said;
	return false;
}

void mpsd_twin_end(struct mpsd_made *made)
{
	struct mpsd_made *context = mpsd_made_context(made->device);

	if (!made->is_twin)
		return;
	if (context && context->is_twin)
		other_cuCtxSetCurrent(context->twin);
	switch (made->kind) {
	case MPSD_MADE_STREAM:
		other_cuStreamDestroy_v2(made->twin);
		break;
	case MPSD_MADE_EVENT:
		other_cuEventDestroy_v2(made->twin);
		break;
	case MPSD_MADE_MODULE:
		other_cuModuleUnload(made->twin);
		break;
	case MPSD_MADE_LIBRARY:
		other_cuLibraryUnload(made->twin);
		break;
	case MPSD_MADE_HOST:
		other_cuMemHostUnregister(mpsd_made_pages(made->name));
		break;
	case MPSD_MADE_EXEC:
		mpsd_ahead_end(made);
		break;
	default:
		break;
	}
}

/* The program retains and releases a context as it likes, and so it will do with the twin. */
static void even_out(struct mpsd_made *made)
{
	CUcontext context;

	for (; made->twin_flags < made->flags; made->twin_flags++)
		other_cuDevicePrimaryCtxRetain(&context, made->device);
	for (; made->twin_flags > made->flags && made->flags; made->twin_flags--)
		other_cuDevicePrimaryCtxRelease_v2(made->device);
}

/* The oldest that has no twin, held; NULL: all have one. `context`: that of its device there. */
static struct mpsd_made *hold_one(CUcontext *context)
{
	struct mpsd_made *made, *its;

	*context = NULL;
	mpsd_made_lock();
	for (made = mpsd_made_oldest(); made && made->is_twin; made = made->newer)
		if (made->kind == MPSD_MADE_CONTEXT)
			even_out(made);
	its = made && made->device >= 0 && made->kind != MPSD_MADE_CONTEXT ? mpsd_made_context(made->device) : NULL;
	if (its && its->is_twin)
		*context = its->twin;
	if (made)
		mpsd_made_hold(made);
	mpsd_made_unlock();
	return made;
}

static bool has_new_code;	/* for the thread of line.c, which makes all twins */

bool mpsd_made_take_code(void)
{
	bool had = has_new_code;

	has_new_code = false;
	return had;
}

static void let_go(struct mpsd_made *made, bool is)
{
	mpsd_made_lock();
	if (mpsd_made_let_go() && is) {
		made->is_twin = true;
		made->is_rehearsed = false;
		has_new_code = has_new_code || mpsd_made_is_code(made);
		made->twin_flags = made->kind == MPSD_MADE_CONTEXT;
		atomic_fetch_sub(&mpsd_made_waiting, 1);
	}
	mpsd_made_unlock();
}

/* Without the lock: a context or a module takes long, and the program's threads would wait for it. */
bool mpsd_made_twins(const char **what)
{
	struct mpsd_made *made;
	CUcontext context;
	bool is = true;

	while (is && (made = hold_one(&context))) {
		is = make_in(context, made, what);
		let_go(made, is);
		/* Who waited for this one comes before the next one, which may be of the same module. */
		for (int i = 0; i < MOST_YIELDS && mpsd_made_is_awaited(); i++)
			sched_yield();
	}
	return is;
}

void mpsd_made_no_twins(void)
{
	mpsd_made_lock();
	for (struct mpsd_made *made = mpsd_made_oldest(); made; made = made->newer) {
		if (mpsd_made_is_late(made->kind)) {
			mpsd_ahead_forget(made);
			continue;
		}
		if (made->is_twin)
			atomic_fetch_add(&mpsd_made_waiting, 1);
		made->is_twin = false;
		made->twin = NULL;
	}
	mpsd_made_unlock();
}
