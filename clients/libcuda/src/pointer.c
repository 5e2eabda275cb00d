// SPDX-License-Identifier: MIT
/*
 * What can be asked about a pointer into the window: the driver answers for the mapping that it
 * knows, and what differs for the allocation is put right afterwards.
 */
#include "memory.h"
#include "proxy.h"

static void put_right(void *data, CUpointer_attribute attribute, const struct mpsd_allocation *allocation)
{
	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		*(CUcontext *)data = allocation->owner;
		break;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		*(CUdeviceptr *)data = allocation->base;
		break;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		*(size_t *)data = allocation->size;
		break;
	default:
		break;
	}
}

CUresult wrap_cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	CUresult result = real_cuPointerGetAttribute(data, attribute, ptr);
	struct mpsd_allocation allocation;

	if (result == CUDA_SUCCESS && mpsd_memory_find(ptr, &allocation))
		put_right(data, attribute, &allocation);
	return result;
}

CUresult wrap_cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes, void **data,
				     CUdeviceptr ptr)
{
	CUresult result = real_cuPointerGetAttributes(numAttributes, attributes, data, ptr);
	struct mpsd_allocation allocation;

	if (result == CUDA_SUCCESS && mpsd_memory_find(ptr, &allocation))
		for (unsigned int i = 0; i < numAttributes; i++)
			put_right(data[i], attributes[i], &allocation);
	return result;
}
