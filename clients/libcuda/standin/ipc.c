// SPDX-License-Identifier: MIT
/*
 * Legacy IPC: a handle names the exporter, its file of device memory and the place there. The opener
 * maps that, for as long as the exporter lives to be asked.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "standin.h"

#define MAGIC "standin1"
#define PAGE ((size_t)4096)

struct handle {
	char magic[8];
	int32_t exporter, file;
	int64_t offset;
	uint64_t size, id;
	char unused[24];
};

_Static_assert(sizeof(struct handle) == sizeof(CUipcMemHandle), "a handle is as long as the driver's");

static size_t rounded(size_t size)
{
	return (size + PAGE - 1) / PAGE * PAGE;
}

API CUresult cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr)
{
	struct handle handle = { .exporter = getpid() };
	const struct range *range;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	range = range_at(dptr, RANGE_DEVICE, RANGE_DEVICE);
	if (!pHandle || !range)
		return leave(CUDA_ERROR_INVALID_VALUE);
	memcpy(handle.magic, MAGIC, sizeof(handle.magic));
	handle.file = device_file();
	handle.offset = range->offset;
	handle.size = range->size;
	handle.id = range->id;
	memcpy(pHandle, &handle, sizeof(handle));
	return leave(CUDA_SUCCESS);
}

/* The lock is held. */
static struct range *find_opened(const struct handle *handle)
{
	uintptr_t at = 0;
	struct range *range;

	while ((range = next_range(at, RANGE_OPENED))) {
		if (range->exporter == handle->exporter && range->exported_id == handle->id)
			return range;
		at = range->base + 1;
	}
	return NULL;
}

static void *map(const struct handle *handle)
{
	char path[64];
	void *at;
	int fd;

	snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle->exporter, handle->file);
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return MAP_FAILED;
	at = mmap(NULL, rounded(handle->size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, handle->offset);
	close(fd);
	return at;
}

static CUresult open_range(const struct handle *handle, CUdeviceptr *address)
{
	struct range *range = find_opened(handle);
	CUresult result;
	void *at;

	if (range) {
		range->references++;
		*address = range->base;
		return CUDA_SUCCESS;
	}
	at = map(handle);
	if (at == MAP_FAILED)
		return CUDA_ERROR_MAP_FAILED;
	result = add_range((struct range){
		.base = (uintptr_t)at, .size = handle->size, .kind = RANGE_OPENED, .readable = true, .writable = true,
		.exporter = handle->exporter, .exported_id = handle->id, .references = 1 });
	if (result == CUDA_SUCCESS)
		*address = (CUdeviceptr)at;
	else
		munmap(at, rounded(handle->size));
	return result;
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle given, unsigned int Flags)
{
	struct handle handle;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	memcpy(&handle, &given, sizeof(handle));
	if (!pdptr || Flags & ~(unsigned int)CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS ||
	    memcmp(handle.magic, MAGIC, sizeof(handle.magic)))
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (handle.exporter == getpid())
		return leave(CUDA_ERROR_INVALID_CONTEXT);
	return leave(open_range(&handle, pdptr));
}

#undef cuIpcOpenMemHandle
API CUresult cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags);
API CUresult cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
{
	return cuIpcOpenMemHandle_v2(pdptr, handle, Flags);
}

static void close_range_of(struct range *range)
{
	munmap((void *)range->base, rounded(range->size));
	remove_range(range);
}

API CUresult cuIpcCloseMemHandle(CUdeviceptr dptr)
{
	struct range *range;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	range = range_from(dptr, RANGE_OPENED);
	if (!range)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (range->references == 1)
		result = wait_for_all(context);
	/* Looked up again: the lock was given up in the wait. */
	range = range_from(dptr, RANGE_OPENED);
	if (result == CUDA_SUCCESS && range && !--range->references)
		close_range_of(range);
	return leave(result);
}

void close_opened(CUdevice device)
{
	struct range *range;

	while ((range = first_range(RANGE_OPENED, device)))
		close_range_of(range);
}
