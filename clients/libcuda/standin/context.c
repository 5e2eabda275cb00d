// SPDX-License-Identifier: MIT
/* The primary contexts. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

pthread_mutex_t gpu_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t gpu_changed = PTHREAD_COND_INITIALIZER;

#define STACK_DEPTH 16

static struct CUctx_st primaries[MOST_DEVICES];

static __thread CUcontext stack[STACK_DEPTH];
static __thread unsigned int depth;

__thread CUcontext working_for;

int device_count(void)
{
	const char *given = getenv("MPSD_STANDIN_DEVICES");
	int count = given ? atoi(given) : 1;

	return count < 1 ? 1 : count > MOST_DEVICES ? MOST_DEVICES : count;
}

bool is_device(CUdevice device)
{
	return device >= 0 && device < device_count();
}

CUcontext primary_of(CUdevice device)
{
	return &primaries[device];
}

static bool is_context(CUcontext context)
{
	for (int i = 0; i < MOST_DEVICES; i++)
		if (context == &primaries[i])
			return true;
	return false;
}

CUcontext current_context(void)
{
	return depth ? stack[depth - 1] : NULL;
}

CUdevice current_device(void)
{
	return current_context() ? current_context()->device : 0;
}

CUresult enter(CUcontext *context)
{
	CUresult result = is_initialised();

	if (result != CUDA_SUCCESS)
		return result;
	/* A function of the host that a stream runs. */
	if (working_for)
		return CUDA_ERROR_NOT_PERMITTED;
	*context = current_context();
	if (!*context)
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&gpu_lock);
	if (!(*context)->retained)
		return leave(CUDA_ERROR_CONTEXT_IS_DESTROYED);
	return (*context)->broken ? leave((*context)->broken) : CUDA_SUCCESS;
}

CUresult leave(CUresult result)
{
	pthread_mutex_unlock(&gpu_lock);
	return result;
}

/* The first reason stays. Waiters look again. */
void kill_context(CUcontext context, CUresult reason)
{
	if (!context->broken)
		context->broken = reason;
	pthread_cond_broadcast(&gpu_changed);
}

bool is_any_retained(void)
{
	for (int i = 0; i < MOST_DEVICES; i++)
		if (primaries[i].retained)
			return true;
	return false;
}

/* Those that a GPU of this kind has. */
static const size_t first_limits[CU_LIMIT_MAX] = {
	[CU_LIMIT_STACK_SIZE] = 1024,
	[CU_LIMIT_PRINTF_FIFO_SIZE] = 1 << 20,
	[CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20,
	[CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048,
	[CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64,
};

static bool has_limit(CUlimit limit)
{
	return (unsigned int)limit < CU_LIMIT_MAX &&
	       (first_limits[limit] || limit == CU_LIMIT_PERSISTING_L2_CACHE_SIZE);
}

/* MPSD_STANDIN_CONTEXT: bytes of the GPU's that a context takes. */
static size_t context_bytes(void)
{
	return environment_bytes("MPSD_STANDIN_CONTEXT", 0);
}

static CUresult open_context(CUcontext context, CUdevice device)
{
	CUresult result;

	if (!backend->take_memory(context_bytes()))
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = is_any_retained() ? CUDA_SUCCESS : backend->attach();
	context->device = device;
	memcpy(context->limits, first_limits, sizeof(first_limits));
	if (result == CUDA_SUCCESS)
		result = open_streams(context);
	if (result != CUDA_SUCCESS) {
		backend->give_memory(context_bytes());
		return result;
	}
	context->broken = CUDA_SUCCESS;
	manager_watch(context);
	note_taken();
	return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
	CUresult result = is_initialised();

	if (result != CUDA_SUCCESS)
		return result;
	if (!pctx)
		return CUDA_ERROR_INVALID_VALUE;
	if (!is_device(dev))
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&gpu_lock);
	if (!primaries[dev].retained)
		result = open_context(&primaries[dev], dev);
	if (result != CUDA_SUCCESS)
		return leave(result);
	primaries[dev].retained++;
	*pctx = &primaries[dev];
	return leave(CUDA_SUCCESS);
}

/*
 * With the context go its modules, what cuMemAlloc and its like gave, and what was enabled between it and
 * others; virtual memory management stays.
 */
static void end_context(CUcontext context)
{
	look_at(context);	/* what is dead need not be waited for */
	context->retained = 0;	/* before the streams end: nobody comes in meanwhile */
	manager_forget(context);
	backend->give_memory(context_bytes());
	close_streams(context);
	close_events(context);
	close_modules(context->device);
	close_memory(context->device);
	close_zones(context->device);
	context->peers = 0;
	for (int i = 0; i < MOST_DEVICES; i++)
		primaries[i].peers &= ~(1u << context->device);
	if (!is_any_retained())
		backend->detach();
	context->broken = CUDA_SUCCESS;
}

/* With the lock held if there is such a device. */
static CUresult enter_device(CUdevice dev)
{
	CUresult result = is_initialised();

	if (result != CUDA_SUCCESS)
		return result;
	if (!is_device(dev))
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&gpu_lock);
	return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
	CUresult result = enter_device(dev);

	if (result != CUDA_SUCCESS)
		return result;
	if (!primaries[dev].retained)
		return leave(CUDA_ERROR_INVALID_CONTEXT);
	if (primaries[dev].retained == 1)
		end_context(&primaries[dev]);
	else
		primaries[dev].retained--;
	return leave(CUDA_SUCCESS);
}

API CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
	CUresult result = enter_device(dev);

	if (result != CUDA_SUCCESS)
		return result;
	if (primaries[dev].retained)
		end_context(&primaries[dev]);
	return leave(CUDA_SUCCESS);
}

#undef cuDevicePrimaryCtxRelease
API CUresult cuDevicePrimaryCtxRelease(CUdevice dev);
API CUresult cuDevicePrimaryCtxRelease(CUdevice dev)
{
	return cuDevicePrimaryCtxRelease_v2(dev);
}

#undef cuDevicePrimaryCtxReset
API CUresult cuDevicePrimaryCtxReset(CUdevice dev);
API CUresult cuDevicePrimaryCtxReset(CUdevice dev)
{
	return cuDevicePrimaryCtxReset_v2(dev);
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
{
	if (!is_device(dev))
		return CUDA_ERROR_INVALID_DEVICE;
	if (!flags || !active)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&gpu_lock);
	*flags = primaries[dev].flags;
	*active = primaries[dev].retained != 0;
	return leave(CUDA_SUCCESS);
}

API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags)
{
	if (!is_device(dev))
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&gpu_lock);
	primaries[dev].flags = flags;
	return leave(CUDA_SUCCESS);
}

API CUresult cuCtxSetCurrent(CUcontext ctx)
{
	CUresult result = is_initialised();

	if (result != CUDA_SUCCESS)
		return result;
	if (ctx && !is_context(ctx))
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!depth)
		depth = 1;
	stack[depth - 1] = ctx;
	gate_keep(GATE_CURRENT);
	return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *pctx)
{
	CUresult result = is_initialised();

	if (result == CUDA_SUCCESS && !pctx)
		result = CUDA_ERROR_INVALID_VALUE;
	if (result == CUDA_SUCCESS)
		*pctx = current_context();
	gate_keep(GATE_CURRENT);
	return result;
}

API CUresult cuCtxPushCurrent_v2(CUcontext ctx)
{
	if (!is_context(ctx) || depth == STACK_DEPTH)
		return CUDA_ERROR_INVALID_CONTEXT;
	stack[depth++] = ctx;
	return CUDA_SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *pctx)
{
	if (!current_context())
		return CUDA_ERROR_INVALID_CONTEXT;
	depth--;
	if (pctx)
		*pctx = stack[depth];
	return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *device)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!device)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*device = context->device;
	return leave(CUDA_SUCCESS);
}

API CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext ctx)
{
	if (!ctx)
		return cuCtxGetDevice(device);
	if (!device || !is_context(ctx))
		return CUDA_ERROR_INVALID_VALUE;
	*device = ctx->device;
	return CUDA_SUCCESS;
}

API CUresult cuCtxGetFlags(unsigned int *flags)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	*flags = context->flags;
	return leave(CUDA_SUCCESS);
}

API CUresult cuCtxGetApiVersion(CUcontext ctx, unsigned int *version)
{
	(void)ctx;
	if (!version)
		return CUDA_ERROR_INVALID_VALUE;
	*version = DRIVER_VERSION;
	return CUDA_SUCCESS;
}

API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	if (least)
		*least = 0;
	if (greatest)
		*greatest = -5;
	return CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize(void)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	result = refuse_in_capture(context, true);
	result = leave(result == CUDA_SUCCESS ? wait_for_all(context) : result);
	gate_keep(GATE_SYNC);
	return result;
}

API CUresult cuCtxSynchronize_v2(CUcontext ctx)
{
	if (ctx && !is_context(ctx))
		return CUDA_ERROR_INVALID_CONTEXT;
	return cuCtxSynchronize();
}

API CUresult cuCtxGetLimit(size_t *pvalue, CUlimit limit)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!pvalue || !has_limit(limit))
		return leave(pvalue ? CUDA_ERROR_UNSUPPORTED_LIMIT : CUDA_ERROR_INVALID_VALUE);
	*pvalue = context->limits[limit];
	return leave(CUDA_SUCCESS);
}

API CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!has_limit(limit))
		return leave(CUDA_ERROR_UNSUPPORTED_LIMIT);
	context->limits[limit] = value;
	leave(CUDA_SUCCESS);
	gate_keep(GATE_LIMIT);
	return CUDA_SUCCESS;
}
