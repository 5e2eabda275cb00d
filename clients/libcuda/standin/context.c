// SPDX-License-Identifier: MIT
/* Initialisation, and the one context. */
#include <stddef.h>

#include "standin.h"

pthread_mutex_t gpu_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t gpu_changed = PTHREAD_COND_INITIALIZER;

#define STACK_DEPTH 16

static struct CUctx_st primary;
static int state;	/* 0 not initialised, 1 initialised, 2 the child of a process that was */

static __thread CUcontext stack[STACK_DEPTH];
static __thread unsigned int depth;

/* A forked child has none of the threads: like the real driver it is not initialised, for good. */
static void after_fork(void)
{
	if (state)
		state = 2;
}

__attribute__((constructor)) static void watch_forks(void)
{
	pthread_atfork(NULL, NULL, after_fork);
}

CUresult is_initialised(void)
{
	return __atomic_load_n(&state, __ATOMIC_ACQUIRE) == 1 ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

static CUcontext current(void)
{
	return depth ? stack[depth - 1] : NULL;
}

CUresult enter(CUcontext *context)
{
	CUresult result = is_initialised();

	if (result != CUDA_SUCCESS)
		return result;
	*context = current();
	if (!*context)
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&gpu_lock);
	if (!primary.retained)
		return leave(CUDA_ERROR_CONTEXT_IS_DESTROYED);
	return primary.broken ? leave(primary.broken) : CUDA_SUCCESS;
}

CUresult leave(CUresult result)
{
	pthread_mutex_unlock(&gpu_lock);
	return result;
}

/* The first reason stays. Waiters look again. */
void kill_context(CUresult reason)
{
	if (!primary.broken)
		primary.broken = reason;
	pthread_cond_broadcast(&gpu_changed);
}

API CUresult cuInit(unsigned int Flags)
{
	int before = 0;

	if (Flags)
		return CUDA_ERROR_INVALID_VALUE;
	__atomic_compare_exchange_n(&state, &before, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
	return is_initialised();
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
	CUresult result = is_initialised();

	if (result != CUDA_SUCCESS)
		return result;
	if (!pctx)
		return CUDA_ERROR_INVALID_VALUE;
	if (dev)
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&gpu_lock);
	if (!primary.retained) {
		result = backend->attach();
		if (result == CUDA_SUCCESS)
			result = open_streams(&primary);
		if (result != CUDA_SUCCESS)
			return leave(result);
		primary.broken = CUDA_SUCCESS;
	}
	primary.retained++;
	*pctx = &primary;
	return leave(CUDA_SUCCESS);
}

/* With the context go its modules and what cuMemAlloc and its like gave; virtual memory management stays. */
static void end_context(void)
{
	primary.retained = 0;	/* first: nobody comes in while the streams end */
	close_streams(&primary);
	close_modules();
	close_memory();
	close_zones();
	backend->detach();
	primary.broken = CUDA_SUCCESS;
}

/* With the lock held if there is such a device. */
static CUresult enter_device(CUdevice dev)
{
	CUresult result = is_initialised();

	if (result != CUDA_SUCCESS)
		return result;
	if (dev)
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&gpu_lock);
	return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
	CUresult result = enter_device(dev);

	if (result != CUDA_SUCCESS)
		return result;
	if (!primary.retained)
		return leave(CUDA_ERROR_INVALID_CONTEXT);
	if (primary.retained == 1)
		end_context();
	else
		primary.retained--;
	return leave(CUDA_SUCCESS);
}

API CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
	CUresult result = enter_device(dev);

	if (result != CUDA_SUCCESS)
		return result;
	if (primary.retained)
		end_context();
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
	if (dev)
		return CUDA_ERROR_INVALID_DEVICE;
	if (!flags || !active)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&gpu_lock);
	*flags = primary.flags;
	*active = primary.retained != 0;
	return leave(CUDA_SUCCESS);
}

API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags)
{
	if (dev)
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&gpu_lock);
	primary.flags = flags;
	return leave(CUDA_SUCCESS);
}

API CUresult cuCtxSetCurrent(CUcontext ctx)
{
	CUresult result = is_initialised();

	if (result != CUDA_SUCCESS)
		return result;
	if (ctx && ctx != &primary)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!depth)
		depth = 1;
	stack[depth - 1] = ctx;
	return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *pctx)
{
	CUresult result = is_initialised();

	if (result == CUDA_SUCCESS && !pctx)
		result = CUDA_ERROR_INVALID_VALUE;
	if (result == CUDA_SUCCESS)
		*pctx = current();
	return result;
}

API CUresult cuCtxPushCurrent_v2(CUcontext ctx)
{
	if (ctx != &primary || depth == STACK_DEPTH)
		return CUDA_ERROR_INVALID_CONTEXT;
	stack[depth++] = ctx;
	return CUDA_SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *pctx)
{
	if (!current())
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
	*device = 0;
	return leave(CUDA_SUCCESS);
}

API CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext ctx)
{
	if (!ctx)
		return cuCtxGetDevice(device);
	if (!device || ctx != &primary)
		return CUDA_ERROR_INVALID_VALUE;
	*device = 0;
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

	return result == CUDA_SUCCESS ? leave(wait_for_all(context)) : result;
}

API CUresult cuCtxSynchronize_v2(CUcontext ctx)
{
	if (ctx && ctx != &primary)
		return CUDA_ERROR_INVALID_CONTEXT;
	return cuCtxSynchronize();
}

static size_t limits[CU_LIMIT_MAX] = {
	[CU_LIMIT_STACK_SIZE] = 1024,
	[CU_LIMIT_PRINTF_FIFO_SIZE] = 1 << 20,
	[CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20,
};

API CUresult cuCtxGetLimit(size_t *pvalue, CUlimit limit)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!pvalue || (unsigned int)limit >= CU_LIMIT_MAX)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*pvalue = limits[limit];
	return leave(CUDA_SUCCESS);
}

API CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if ((unsigned int)limit >= CU_LIMIT_MAX)
		return leave(CUDA_ERROR_INVALID_VALUE);
	limits[limit] = value;
	return leave(CUDA_SUCCESS);
}
