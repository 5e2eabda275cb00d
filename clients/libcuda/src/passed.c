// SPDX-License-Identifier: MIT
/* Memory that is not vaulted: it is the driver's, and counted. One atomic addition a call, no lock. */
#include "exact/exact.h"
#include "failover/carry.h"
#include "hostguard.h"
#include "proxy.h"
#include "stats.h"

#define COUNTED(field, call) ({			\
	CUresult result_ = (call);		\
						\
	if (result_ == CUDA_SUCCESS)		\
		mpsd_count(field);		\
	result_;				\
})

/* What is there for a fail-over gives way to the driver's pools, too. A program that uses one is not moved any more. */
static bool has_more(CUresult *result, struct mpsd_shortage *shortage)
{
	bool is = mpsd_exact_has_more_room(result, shortage);

	if (*result == MPSD_AGAIN)
		*result = CUDA_ERROR_OUT_OF_MEMORY;
	return is;
}

#define POOLED(size, call) ({						\
	struct mpsd_shortage shortage_ = { .bytes = (size) };		\
	CUresult pooled_;						\
									\
	do								\
		pooled_ = COUNTED(passed_pool, call);			\
	while (has_more(&pooled_, &shortage_));				\
	pooled_;							\
})

CUresult wrap_cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
	return POOLED(bytesize, real_cuMemAllocAsync(dptr, bytesize, hStream));
}

CUresult wrap_cuMemAllocAsync_ptsz(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
	return POOLED(bytesize, real_cuMemAllocAsync_ptsz(dptr, bytesize, hStream));
}

CUresult wrap_cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream)
{
	return POOLED(bytesize, real_cuMemAllocFromPoolAsync(dptr, bytesize, pool, hStream));
}

CUresult wrap_cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream)
{
	return POOLED(bytesize, real_cuMemAllocFromPoolAsync_ptsz(dptr, bytesize, pool, hStream));
}

CUresult wrap_cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
	return COUNTED(passed_managed, real_cuMemAllocManaged(dptr, bytesize, flags));
}

CUresult wrap_cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags)
{
	return COUNTED(passed_host, real_cuMemHostAlloc(pp, bytesize, Flags));
}

CUresult wrap_cuMemAllocHost_v2(void **pp, size_t bytesize)
{
	return COUNTED(passed_host, real_cuMemAllocHost_v2(pp, bytesize));
}

CUresult wrap_cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags)
{
	struct mpsd_spared *spared = mpsd_hostguard_spare(p, bytesize);
	CUresult result = COUNTED(passed_host, real_cuMemHostRegister_v2(p, bytesize, Flags));

	mpsd_hostguard_settle(spared, result == CUDA_SUCCESS);
	return result;
}

#undef cuMemHostRegister
CUresult wrap_cuMemHostRegister(void *p, size_t bytesize, unsigned int Flags)
{
	struct mpsd_spared *spared = mpsd_hostguard_spare(p, bytesize);
	CUresult result = COUNTED(passed_host, real_cuMemHostRegister(p, bytesize, Flags));

	mpsd_hostguard_settle(spared, result == CUDA_SUCCESS);
	return result;
}

CUresult wrap_cuMemHostUnregister(void *p)
{
	struct mpsd_spared *spared = mpsd_hostguard_spared(p);
	CUresult result = real_cuMemHostUnregister(p);

	mpsd_hostguard_settle(spared, result != CUDA_SUCCESS);
	return result;
}

CUresult wrap_cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
			  unsigned long long flags)
{
	return COUNTED(passed_exportable, real_cuMemCreate(handle, size, prop, flags));
}
