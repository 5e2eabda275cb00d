// SPDX-License-Identifier: MIT
/* The devices, what can be asked about pointers, and the names of errors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

#define NAME "mpsd stand-in GPU"

/* MPSD_STANDIN_VERSION: to stand for a driver of another generation. */
API CUresult cuDriverGetVersion(int *driverVersion)
{
	const char *given = getenv("MPSD_STANDIN_VERSION");

	if (!driverVersion)
		return CUDA_ERROR_INVALID_VALUE;
	*driverVersion = given ? atoi(given) : DRIVER_VERSION;
	return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int *count)
{
	CUresult result = is_initialised();

	if (result == CUDA_SUCCESS && !count)
		result = CUDA_ERROR_INVALID_VALUE;
	if (result == CUDA_SUCCESS)
		*count = device_count();
	return result;
}

static CUresult check(CUdevice dev, const void *answer)
{
	CUresult result = is_initialised();

	if (result != CUDA_SUCCESS)
		return result;
	if (!is_device(dev))
		return CUDA_ERROR_INVALID_DEVICE;
	return answer ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
	CUresult result = check(ordinal, device);

	if (result == CUDA_SUCCESS)
		*device = ordinal;
	return result;
}

API CUresult cuDeviceGetName(char *name, int len, CUdevice dev)
{
	CUresult result = check(dev, name);

	if (result == CUDA_SUCCESS && len > 0)
		snprintf(name, (size_t)len, NAME);
	return result;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev)
{
	CUresult result = check(dev, uuid);

	if (result != CUDA_SUCCESS)
		return result;
	memcpy(uuid->bytes, "mpsd-stand-in-0", sizeof(uuid->bytes));
	uuid->bytes[sizeof(uuid->bytes) - 2] = (char)('0' + dev);
	return result;
}

#undef cuDeviceGetUuid
API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice dev);
API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice dev)
{
	return cuDeviceGetUuid_v2(uuid, dev);
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
	CUresult result = check(dev, bytes);

	if (result == CUDA_SUCCESS)
		*bytes = backend->total_memory();
	return result;
}

static int given_number(const char *variable)
{
	const char *given = getenv(variable);

	return given ? atoi(given) : 0;
}

API CUresult cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)
{
	CUresult result = check(dev, pi);

	if (result != CUDA_SUCCESS)
		return result;
	switch (attrib) {
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
		*pi = 9;
		break;
	case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
		*pi = given_number("MPSD_STANDIN_MEMORY_CLOCK");
		break;
	case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
		*pi = given_number("MPSD_STANDIN_BUS_WIDTH");
		break;
	case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
		*pi = 32;
		break;
	case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
		*pi = 4;
		break;
	case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
	case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
	case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
		*pi = 1024;
		break;
	case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
		*pi = 64;
		break;
	case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
		*pi = 0x7fffffff;
		break;
	case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
	case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
		*pi = 65535;
		break;
	case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
		*pi = 2048;
		break;
	case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
		*pi = SHARED_BYTES;
		break;
	case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
		*pi = MOST_SHARED_BYTES;
		break;
	case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
	case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
	case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
	case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
		*pi = 1;
		break;
	default:
		*pi = 0;
	}
	return CUDA_SUCCESS;
}

/* 0 is no range: an attribute of a pointer that the driver does not know. */
static CUresult pointer_attribute(void *data, CUpointer_attribute attribute, const struct range *range,
				  CUdeviceptr ptr)
{
	bool on_host = range->kind == RANGE_HOST || range->kind == RANGE_REGISTERED;

	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		*(CUcontext *)data = range->kind == RANGE_MAPPED ? NULL : primary_of(range->device);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*(unsigned int *)data = on_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
		*(CUdeviceptr *)data = ptr;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		if (!on_host)
			return CUDA_ERROR_INVALID_VALUE;
		*(void **)data = (void *)ptr;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
		*(unsigned long long *)data = range->id;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
		*(bool *)data = false;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		*(int *)data = range->kind == RANGE_MAPPED ? physical_device(range->physical) : range->device;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		*(CUdeviceptr *)data = range->base;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		*(size_t *)data = range->size;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
		*(bool *)data = range->sync_memops;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
		*(bool *)data = range->kind == RANGE_DEVICE;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
		*(unsigned long long *)data = range->kind == RANGE_MAPPED ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
									  : CU_MEM_HANDLE_TYPE_NONE;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
		*(CUmemoryPool *)data = range->pool;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MAPPED:
		*(bool *)data = range->kind != RANGE_MAPPED || range->readable;
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}

static const struct range *pointed_to(CUdeviceptr ptr)
{
	const struct range *range = range_at(ptr, RANGE_DEVICE, RANGE_REGISTERED);

	return range ? range : range_at(ptr, RANGE_MAPPED, RANGE_MAPPED);
}

API CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	const struct range *range;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	range = pointed_to(ptr);
	if (!data || !range)
		return leave(CUDA_ERROR_INVALID_VALUE);
	return leave(pointer_attribute(data, attribute, range, ptr));
}

/* Unlike the single question, this one is no error for a pointer that is not the driver's. */
API CUresult cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes, void **data,
				    CUdeviceptr ptr)
{
	const struct range *range;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!attributes || !data)
		return leave(CUDA_ERROR_INVALID_VALUE);
	range = pointed_to(ptr);
	for (unsigned int i = 0; i < numAttributes; i++) {
		if (range)
			pointer_attribute(data[i], attributes[i], range, ptr);
		else if (attributes[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
			*(unsigned int *)data[i] = 0;
		else if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
			*(int *)data[i] = -2;
	}
	return leave(CUDA_SUCCESS);
}

/* As a driver that has it for memory of cuMemAlloc alone. */
API CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	struct range *range;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	range = range_at(ptr, RANGE_DEVICE, RANGE_DEVICE);
	if (!value || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS || !range)
		return leave(CUDA_ERROR_INVALID_VALUE);
	range->sync_memops = *(const bool *)value;
	return leave(CUDA_SUCCESS);
}

static const struct {
	CUresult code;
	const char *name, *text;
} errors[] = {
#define ERROR(name, text) { name, #name, text }
	ERROR(CUDA_SUCCESS, "no error"),
	ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
	ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
	ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
	ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
	ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
	ERROR(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed"),
	ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
	ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
	ERROR(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
	ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
	ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
	ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
	ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
	ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
	ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
	ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
	ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
#undef ERROR
};

static CUresult error_text(CUresult error, const char **answer, bool name)
{
	if (!answer)
		return CUDA_ERROR_INVALID_VALUE;
	*answer = NULL;
	for (size_t i = 0; i < sizeof(errors) / sizeof(*errors); i++)
		if (errors[i].code == error)
			*answer = name ? errors[i].name : errors[i].text;
	return *answer ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult error, const char **pStr)
{
	return error_text(error, pStr, false);
}

API CUresult cuGetErrorName(CUresult error, const char **pStr)
{
	return error_text(error, pStr, true);
}
