// SPDX-License-Identifier: MIT
/*
 * Launches, in the ledger: how many there were, the latest of them, how many are known to have ended.
 * A launch is counted before it is made, so that none is in flight unseen, with no lock and no call; in
 * exchange, a wait in another thread at that very moment may count it among those it has waited for.
 */
#include "launches.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "failover/carry.h"
#include "notes.h"
#include "proxy.h"

#define PLACES 8192u	/* twice as many as there are names */

static atomic_uintptr_t only_context;
static atomic_bool several_contexts;
static MPSD_WRITTEN_OFTEN uint64_t elsewhere;	/* 1 + the number of the latest launch that was not on the legacy stream */

/* Another thread may just be opening the first window. */
static inline struct mpsd_ledger *current(void)
{
	return __atomic_load_n(&mpsd_ledger, __ATOMIC_ACQUIRE);
}

/* The path of a launch */

MPSD_OF_A_LAUNCH void mpsd_launches_fetch(unsigned int index)
{
	__builtin_prefetch(&mpsd_inner[index]);
	__builtin_prefetch(&mpsd_real[index]);
	__builtin_prefetch(&current()->launched, 1);
}

MPSD_OF_A_LAUNCH void mpsd_launches_fetch_row(void)
{
	struct mpsd_ledger *ledger = current();
	uint64_t number = __atomic_load_n(&ledger->launched, __ATOMIC_RELAXED);

	__builtin_prefetch(&ledger->launches[number % MPSD_LEDGER_LAUNCHES], 1);
}

static inline void count(const void *function, CUstream stream, bool may_be_legacy)
{
	struct mpsd_ledger *ledger = current();
	uint64_t number = __atomic_fetch_add(&ledger->launched, 1, __ATOMIC_RELAXED);
	struct mpsd_launch_row *row = &ledger->launches[number % MPSD_LEDGER_LAUNCHES];

	__atomic_store_n(&row->function, (uintptr_t)function, __ATOMIC_RELAXED);
	__atomic_store_n(&row->stream, (uintptr_t)stream, __ATOMIC_RELAXED);
	if (!(stream == CU_STREAM_LEGACY || (!stream && may_be_legacy)))
		__atomic_store_n(&elsewhere, number + 1, __ATOMIC_RELAXED);
}

MPSD_OF_A_LAUNCH CUresult wrap_cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
			     unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
			     unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra)
{
	count(f, hStream, true);
	return real_cuLaunchKernel(f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ,
				   sharedMemBytes, hStream, kernelParams, extra);
}

CUresult wrap_cuLaunchKernel_ptsz(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
				  unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY,
				  unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
				  void **kernelParams, void **extra)
{
	count(f, hStream, false);
	return real_cuLaunchKernel_ptsz(f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ,
					sharedMemBytes, hStream, kernelParams, extra);
}

/* What is wrong with the configuration is for the driver to say. */
MPSD_OF_A_LAUNCH CUresult wrap_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)
{
	if (config)
		count(f, config->hStream, true);
	return real_cuLaunchKernelEx(config, f, kernelParams, extra);
}

CUresult wrap_cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)
{
	if (config)
		count(f, config->hStream, false);
	return real_cuLaunchKernelEx_ptsz(config, f, kernelParams, extra);
}

CUresult wrap_cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
					unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY,
					unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
					void **kernelParams)
{
	count(f, hStream, true);
	return real_cuLaunchCooperativeKernel(f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ,
					      sharedMemBytes, hStream, kernelParams);
}

CUresult wrap_cuLaunchCooperativeKernel_ptsz(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
					     unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY,
					     unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
					     void **kernelParams)
{
	count(f, hStream, false);
	return real_cuLaunchCooperativeKernel_ptsz(f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY,
						   blockDimZ, sharedMemBytes, hStream, kernelParams);
}

/* Its kernels have no names here; what matters is that none of the others is taken for the only one. */
CUresult wrap_cuGraphLaunch(CUgraphExec hGraph, CUstream hStream)
{
	count(hGraph, hStream, true);
	return real_cuGraphLaunch(hGraph, hStream);
}

CUresult wrap_cuGraphLaunch_ptsz(CUgraphExec hGraphExec, CUstream hStream)
{
	count(hGraphExec, hStream, false);
	return real_cuGraphLaunch_ptsz(hGraphExec, hStream);
}

/* Waits */

struct wait {
	struct mpsd_ledger *ledger;
	uint64_t launched;
};

static struct wait begin_wait(void)
{
	struct mpsd_ledger *ledger = current();

	return (struct wait){ ledger, __atomic_load_n(&ledger->launched, __ATOMIC_ACQUIRE) };
}

/* A wait that was begun before the window was opened proves nothing in the ledger that is there after it. */
static void settle(struct wait wait)
{
	uint64_t *settled = &wait.ledger->settled, before = __atomic_load_n(settled, __ATOMIC_RELAXED);

	if (wait.ledger != current() || atomic_load(&several_contexts))
		return;
	while (before < wait.launched &&
	       !__atomic_compare_exchange_n(settled, &before, wait.launched, false, __ATOMIC_RELEASE,
					    __ATOMIC_RELAXED))
		;
}

CUresult wrap_cuCtxSynchronize(void)
{
	struct wait wait = begin_wait();
	CUresult result = real_cuCtxSynchronize();

	if (result == CUDA_SUCCESS)
		settle(wait);
	return result;
}

#ifdef MPSD_cuCtxSynchronize_v2
CUresult wrap_cuCtxSynchronize_v2(CUcontext ctx)
{
	struct wait wait = begin_wait();
	CUresult result = real_cuCtxSynchronize_v2(ctx);

	if (result == CUDA_SUCCESS)
		settle(wait);
	return result;
}
#endif

/* The legacy stream has waited for its own work only: enough where all that is not settled is its own. */
CUresult wrap_cuStreamSynchronize(CUstream hStream)
{
	struct wait wait = begin_wait();
	CUresult result = real_cuStreamSynchronize(hStream);

	if (result == CUDA_SUCCESS && (!hStream || hStream == CU_STREAM_LEGACY) &&
	    __atomic_load_n(&elsewhere, __ATOMIC_RELAXED) <= __atomic_load_n(&wait.ledger->settled, __ATOMIC_RELAXED))
		settle(wait);
	return result;
}

/* Contexts */

void mpsd_launches_context(CUcontext context)
{
	uintptr_t none = 0;

	if (!atomic_compare_exchange_strong(&only_context, &none, (uintptr_t)context) &&
	    none != (uintptr_t)context)
		atomic_store(&several_contexts, true);
}

void mpsd_launches_no_context(CUcontext context)
{
	uintptr_t it = (uintptr_t)context;

	atomic_compare_exchange_strong(&only_context, &it, 0);
}

static CUresult created(CUresult result, void *context)
{
	if (result == CUDA_SUCCESS)
		mpsd_launches_context((CUcontext)context);
	return result;
}

CUresult wrap_cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
	CUresult result = real_cuCtxCreate(pctx, flags, dev);

	return created(result, result ? NULL : *pctx);
}

CUresult wrap_cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
	CUresult result = real_cuCtxCreate_v2(pctx, flags, dev);

	return created(result, result ? NULL : *pctx);
}

CUresult wrap_cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams, unsigned int flags,
			     CUdevice dev)
{
	CUresult result = real_cuCtxCreate_v3(pctx, paramsArray, numParams, flags, dev);

	return created(result, result ? NULL : *pctx);
}

#ifdef MPSD_cuCtxCreate_v4
CUresult wrap_cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev)
{
	CUresult result = real_cuCtxCreate_v4(pctx, ctxCreateParams, flags, dev);

	return created(result, result ? NULL : *pctx);
}
#endif

CUresult wrap_cuGreenCtxCreate(CUgreenCtx *phCtx, CUdevResourceDesc desc, CUdevice dev, unsigned int flags)
{
	CUresult result = real_cuGreenCtxCreate(phCtx, desc, dev, flags);

	return created(result, result ? NULL : *phCtx);
}

/* Names */

static pthread_mutex_t names_lock = PTHREAD_MUTEX_INITIALIZER;
static uint16_t places[PLACES];		/* 1 + a row, by the function's hash */

_Static_assert(PLACES == 1u << 13 && PLACES >= 2 * MPSD_LEDGER_NAMES, "the hash below has 13 bits");

/* The place of the function's row, or the empty one where it would be. Under the lock. */
static uint16_t *place_of(const void *function)
{
	uint32_t at = (uint32_t)(((uintptr_t)function >> 4) * 0x9e3779b97f4a7c15ull >> 51);

	while (places[at] && mpsd_ledger->names[places[at] - 1].function != (uintptr_t)function)
		at = (at + 1) % PLACES;
	return &places[at];
}

static void write_name(struct mpsd_name_row *row, const void *function, const char *name)
{
	mpsd_row_begin(&row->sequence);
	row->function = (uintptr_t)function;
	strncpy(row->name, name, sizeof(row->name) - 1);
	mpsd_row_end(&row->sequence);
}

/* A function that was unloaded may give its handle to another: its row says the latest name. */
static void keep_name(const void *function, const char *name)
{
	struct mpsd_ledger *ledger;
	uint16_t *place;

	pthread_mutex_lock(&names_lock);
	ledger = mpsd_ledger;
	place = place_of(function);
	if (*place) {
		struct mpsd_name_row *row = &ledger->names[*place - 1];

		if (strncmp(row->name, name, sizeof(row->name) - 1))
			write_name(row, function, name);
	} else if (ledger->names_used < MPSD_LEDGER_NAMES) {
		write_name(&ledger->names[ledger->names_used], function, name);
		*place = (uint16_t)(ledger->names_used + 1);
		__atomic_store_n(&ledger->names_used, ledger->names_used + 1, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&names_lock);
}

/* A launch at this very moment may be counted in the ledger that was there before, and nowhere else. */
static void move_launches(struct mpsd_ledger *to, const struct mpsd_ledger *from)
{
	for (int i = 0; i < MPSD_LEDGER_LAUNCHES; i++) {
		to->launches[i].function = __atomic_load_n(&from->launches[i].function, __ATOMIC_RELAXED);
		to->launches[i].stream = __atomic_load_n(&from->launches[i].stream, __ATOMIC_RELAXED);
	}
	/* In this order: what is settled was launched. */
	to->settled = __atomic_load_n(&from->settled, __ATOMIC_ACQUIRE);
	to->launched = __atomic_load_n(&from->launched, __ATOMIC_RELAXED);
}

void mpsd_launches_move(struct mpsd_ledger *to)
{
	pthread_mutex_lock(&names_lock);
	memcpy(to->names, mpsd_ledger->names, mpsd_ledger->names_used * sizeof(to->names[0]));
	to->names_used = mpsd_ledger->names_used;
	move_launches(to, mpsd_ledger);
	__atomic_store_n(&mpsd_ledger, to, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&names_lock);
}

CUresult wrap_cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name)
{
	CUresult result = real_cuModuleGetFunction(hfunc, hmod, name);

	if (result == CUDA_SUCCESS)
		keep_name(*hfunc, name);
	return result;
}

CUresult wrap_cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name)
{
	CUresult result = real_cuLibraryGetKernel(pKernel, library, name);

	if (result == CUDA_SUCCESS)
		keep_name(*pKernel, name);
	return result;
}

CUresult wrap_cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel)
{
	CUresult result = real_cuKernelGetFunction(pFunc, kernel);
	char name[MPSD_LEDGER_NAME_ROOM] = "";
	uint16_t *place;

	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&names_lock);
	place = place_of(kernel);
	if (*place)
		memcpy(name, mpsd_ledger->names[*place - 1].name, sizeof(name));
	pthread_mutex_unlock(&names_lock);
	if (*name)
		keep_name(*pFunc, name);
	return result;
}
