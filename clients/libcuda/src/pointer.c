// SPDX-License-Identifier: MIT
/*
 * What can be asked about a pointer into the window. The driver answers for the mapping that it knows,
 * and what differs for memory of cuMemAlloc is put right afterwards; mpsd/docs/proxy-memory.md has the list.
 */
#include "channel.h"
#include "marks.h"
#include "failover/pools.h"
#include "failover/vmm.h"
#include "hold.h"
#include "memory.h"
#include "proxy.h"

CUresult wrap_cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
	struct mpsd_allocation allocation;
	bool is = mpsd_memory_find(dptr, &allocation);
	struct mpsd_pool_answer pool;
	CUdevice device;

	/* Where there is none, the driver would find the slab: its answer is for other addresses. */
	if ((!is && (!mpsd_memory_is_in_window(dptr) || mpsd_memory_is_held(dptr))) ||
	    real_cuCtxGetDevice(&device) != CUDA_SUCCESS)
		return real_cuMemGetAddressRange_v2(pbase, psize, dptr);
	if (is && mpsd_pools_look(allocation.base, &pool)) {
		is = !pool.is_free && dptr - allocation.base < pool.size;
		allocation.size = pool.size;
	}
	if (!is)
		return CUDA_ERROR_NOT_FOUND;
	if (pbase)
		*pbase = allocation.base;
	if (psize)
		*psize = allocation.size;
	return CUDA_SUCCESS;
}

/* False for what the driver answers. Truth is one byte: whatever the caller has, that fits. */
static bool put_right(void *data, CUpointer_attribute attribute, const struct mpsd_allocation *allocation)
{
	struct mpsd_pool_answer pool;
	bool is_pooled = mpsd_pools_look(allocation->base, &pool);

	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		*(CUcontext *)data = allocation->owner;
		return true;
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
		*(bool *)data = mpsd_mark_sync_memops(allocation->base);
		return true;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
		*(unsigned long long *)data = mpsd_mark_id(allocation->base);
		return true;
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
		*(bool *)data = !allocation->is_imported && !is_pooled && mpsd_channel_path();
		return true;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		*(CUdeviceptr *)data = allocation->base;
		return true;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		*(size_t *)data = is_pooled ? pool.size : allocation->size;
		return true;
	case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
		/* A program that exports what it finds here would export the whole slab as the allocation. */
		*(unsigned long long *)data = CU_MEM_HANDLE_TYPE_NONE;
		return true;
	case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
		*(CUmemoryPool *)data = is_pooled ? pool.pool : NULL;
		return true;
	default:
		return false;
	}
}

/* The driver has memory that this library has made exportable for itself. */
static void put_right_mapped(void *data, CUpointer_attribute attribute, CUdeviceptr address)
{
	if (attribute == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES && mpsd_memory_is_held(address))
		mpsd_vmm_handle_types(address, data);
}

CUresult wrap_cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	CUresult result = real_cuPointerGetAttribute(data, attribute, ptr);
	bool is_answer = result == CUDA_SUCCESS || result == CUDA_ERROR_INVALID_VALUE ||
			 result == CUDA_ERROR_NOT_SUPPORTED;
	struct mpsd_allocation allocation;

	/* What the driver does not know of mapped memory it may know of memory of cuMemAlloc. */
	if (is_answer && data && mpsd_memory_find(ptr, &allocation) && put_right(data, attribute, &allocation))
		return CUDA_SUCCESS;
	if (result == CUDA_SUCCESS && data)
		put_right_mapped(data, attribute, ptr);
	return result;
}

CUresult wrap_cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes, void **data,
				     CUdeviceptr ptr)
{
	CUresult result = real_cuPointerGetAttributes(numAttributes, attributes, data, ptr);
	struct mpsd_allocation allocation;

	bool is;

	if (result != CUDA_SUCCESS)
		return result;
	is = mpsd_memory_find(ptr, &allocation);
	for (unsigned int i = 0; i < numAttributes; i++) {
		if (is)
			put_right(data[i], attributes[i], &allocation);
		else
			put_right_mapped(data[i], attributes[i], ptr);
	}
	return result;
}

/*
 * The driver has this for a whole mapping: once one allocation of a slab wants it all of it has it,
 * which costs some waits. Where the driver does not do it for mapped memory, bounds.c waits.
 */
CUresult wrap_cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	struct mpsd_allocation allocation;
	CUdevice device;
	bool on;

	if (!value || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS || real_cuCtxGetDevice(&device) != CUDA_SUCCESS ||
	    !mpsd_memory_find(ptr, &allocation))
		return real_cuPointerSetAttribute(value, attribute, ptr);
	on = *(const bool *)value;
	if (!mpsd_mark_set_sync_memops(allocation.base, on))
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (on)
		real_cuPointerSetAttribute(value, attribute, ptr);
	return CUDA_SUCCESS;
}

/* The driver's answer would be the slab; of memory of cuMemAlloc it has no handle. */
CUresult wrap_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
	CUdevice device;

	if (handle && mpsd_memory_is_in_window((CUdeviceptr)addr) && !mpsd_memory_is_held((CUdeviceptr)addr) &&
	    real_cuCtxGetDevice(&device) == CUDA_SUCCESS)
		return CUDA_ERROR_INVALID_VALUE;
	return real_cuMemRetainAllocationHandle(handle, addr);
}
