// SPDX-License-Identifier: MIT
/* Host memory that the GPU reaches, and calls with handles inside structures. */
#include "failover/line.h"
#include "failover/made.h"

/* What both calls know: a standby's copy registers the same pages. */
#define REGISTER_FLAGS (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP)

static CUresult note_pages(CUresult result, void *pages, size_t size, unsigned int flags, bool own, uint64_t moves)
{
	struct mpsd_made record = {
		.kind = MPSD_MADE_HOST, .native = pages, .size = size, .flags = flags & REGISTER_FLAGS,
		.value = own ? (int)moves : -1,
	};

	if (result != CUDA_SUCCESS)
		return result;
	return mpsd_made_add(&record, moves) ? result : MPSD_AGAIN;
}

CUresult make_cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags)
{
	uint64_t moves = mpsd_tables()->moves;
	CUresult result = inner_cuMemHostAlloc(pp, bytesize, Flags);

	return note_pages(result, result == CUDA_SUCCESS ? *pp : NULL, bytesize, Flags, true, moves);
}

CUresult make_cuMemAllocHost_v2(void **pp, size_t bytesize)
{
	uint64_t moves = mpsd_tables()->moves;
	CUresult result = inner_cuMemAllocHost_v2(pp, bytesize);

	return note_pages(result, result == CUDA_SUCCESS ? *pp : NULL, bytesize, 0, true, moves);
}

CUresult make_cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags)
{
	uint64_t moves = mpsd_tables()->moves;
	CUresult result = inner_cuMemHostRegister_v2(p, bytesize, Flags);

	if (result == CUDA_SUCCESS && Flags & ~(unsigned int)REGISTER_FLAGS)
		mpsd_line_opaque("cuMemHostRegister of other memory than the process's own");
	return note_pages(result, p, bytesize, Flags, false, moves);
}

CUresult make_cuMemHostUnregister(void *p)
{
	mpsd_made_end(p);
	return inner_cuMemHostUnregister(p);
}

/* What a copy allocated that has gone is registered in this one, and stays the program's until it ends. */
CUresult make_cuMemFreeHost(void *p)
{
	struct mpsd_made *made;
	int moves = 0;

	mpsd_made_lock();
	made = mpsd_made_find(p);
	if (made && made->kind == MPSD_MADE_HOST)
		moves = made->value;
	mpsd_made_unlock();
	mpsd_made_end(p);
	if (moves >= 0 && (uint64_t)moves != (mpsd_tables()->moves))
		return inner_cuMemHostUnregister(p);
	return inner_cuMemFreeHost(p);
}

CUresult make_cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	CUresult result = inner_cuPointerGetAttribute(data, attribute, ptr);

	if (result == CUDA_SUCCESS && attribute == CU_POINTER_ATTRIBUTE_CONTEXT)
		*(CUcontext *)data = mpsd_name(*(CUcontext *)data);
	return result;
}

#define MOST_ATTRIBUTES 32

static void translate(CUlaunchAttribute *attribute)
{
	if (attribute->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT)
		attribute->value.programmaticEvent.event = mpsd_native(attribute->value.programmaticEvent.event);
	else if (attribute->id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT)
		attribute->value.launchCompletionEvent.event =
			mpsd_native(attribute->value.launchCompletionEvent.event);
}

CUresult make_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)
{
	CUlaunchAttribute attributes[MOST_ATTRIBUTES];
	CUlaunchConfig own;

	if (config)
		mpsd_work(config->hStream);
	if (!config || !mpsd_tables()->moves ||
	    config->numAttrs > MOST_ATTRIBUTES)
		return inner_cuLaunchKernelEx(config, f, kernelParams, extra);
	own = *config;
	own.hStream = mpsd_native(own.hStream);
	for (unsigned int i = 0; i < own.numAttrs; i++) {
		attributes[i] = config->attrs[i];
		translate(&attributes[i]);
	}
	own.attrs = attributes;
	return inner_cuLaunchKernelEx(&own, mpsd_native(f), kernelParams, extra);
}
