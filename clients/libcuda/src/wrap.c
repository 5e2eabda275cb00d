// SPDX-License-Identifier: MIT
/* The wrappers that every program meets: how it starts, and how it finds functions. */
#include <pthread.h>

#include "failover/carry.h"
#include "failover/copy.h"
#include "failover/line.h"
#include "failover/lost.h"
#include "hostguard.h"
#include "memory.h"
#include "proxy.h"
#include "stats.h"

static void start_memory(void)
{
	mpsd_hostguard_prepare();
	mpsd_install(MPSD_WHEN_MEMORY);
}

static void check(void)
{
	const char *reason = mpsd_reason_to_step_aside();
	bool wanted = !reason && mpsd_memory_wanted();

	if (reason)
		mpsd_step_aside(reason);
	else if (wanted)
		start_memory();
	/* Only what lies in a window can come along. What the first copy has on the GPU is known from the beginning. */
	if (wanted && mpsd_line_offered()) {
		mpsd_carry_install();
		mpsd_lost_watch();
		mpsd_copy_watch_first();
	}
}

CUresult wrap_cuInit(unsigned int Flags)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, check);
	return real_cuInit(Flags);
}

static CUresult map_answer(CUresult result, const char *symbol, void **function)
{
	void *stub;

	mpsd_count(asked);
	if (result != CUDA_SUCCESS || !function || !*function)
		return result;
	stub = mpsd_map_find(*function);
	if (stub) {
		*function = stub;
		mpsd_count(mapped);
	} else {
		mpsd_stats_unknown(symbol);
	}
	return result;
}

CUresult wrap_cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
				  CUdriverProcAddressQueryResult *symbolStatus)
{
	return map_answer(real_cuGetProcAddress_v2(symbol, pfn, cudaVersion, flags, symbolStatus), symbol, pfn);
}

#undef cuGetProcAddress
CUresult wrap_cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)
{
	return map_answer(real_cuGetProcAddress(symbol, pfn, cudaVersion, flags), symbol, pfn);
}

CUresult wrap_cuGetExportTable(const void **ppExportTable, const CUuuid *pExportTableId)
{
	mpsd_count(export_tables);
	return real_cuGetExportTable(ppExportTable, pExportTableId);
}
