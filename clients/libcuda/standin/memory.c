// SPDX-License-Identifier: MIT
/*
 * The cuMemAlloc family, and host memory. All device memory of the process is in one memfd, each piece at
 * a place of its own that is never used again, so that other processes can map it (ipc.c).
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "standin.h"

#define ALIGNMENT ((size_t)4096)	/* a real driver promises 256, and gives 512 */
#define SMALL ((size_t)1 << 20)
#define PITCH_ALIGNMENT ((size_t)512)

static size_t rounded(size_t size)
{
	return (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static int file = -1;
static off_t file_end;

int device_file(void)
{
	return file;
}

void close_device_file(void)
{
	if (file >= 0)
		close(file);
	file = -1;
	file_end = 0;
}

static void *map_device(size_t size)
{
	void *at;

	if (file < 0)
		file = memfd_create("mpsd-standin-memory", MFD_CLOEXEC);
	if (file < 0 || ftruncate(file, file_end + (off_t)size))
		return MAP_FAILED;
	at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, file_end);
	if (at != MAP_FAILED)
		file_end += (off_t)size;
	return at;
}

static void unmap_device(const struct range *range)
{
	munmap((void *)range->base, rounded(range->size));
	fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, range->offset, (off_t)rounded(range->size));
}

/* Memory with a range of its own, or 0. */
static uintptr_t new_range(size_t size, enum range_kind kind)
{
	void *at = kind == RANGE_DEVICE ? map_device(rounded(size))
					: mmap(NULL, rounded(size), PROT_READ | PROT_WRITE,
					       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	struct range range = {
		.base = (uintptr_t)at,
		.size = size,
		.kind = kind,
		.readable = true,
		.writable = true,
		.offset = kind == RANGE_DEVICE ? file_end - (off_t)rounded(size) : 0,
	};

	if (at == MAP_FAILED)
		return 0;
	/* Measured: the kernel of the host knows of no sparse range, and the driver then fails. */
	if (is_range_free(range.base, rounded(size), RANGE_SPARSE) && add_range(range) == CUDA_SUCCESS)
		return range.base;
	munmap(at, rounded(size));
	return 0;
}

/*
 * What is not small takes whole granules of the GPU, as a driver is believed to do it (to be measured);
 * the last one may be cut short. 0: so much is not there.
 */
static size_t take(size_t size)
{
	size_t whole = size > SMALL ? (size + GRANULARITY - 1) / GRANULARITY * GRANULARITY : rounded(size);

	if (rounded(size) < size || whole < size)
		return 0;
	if (backend->take_memory(whole))
		return whole;
	return backend->take_memory(rounded(size)) ? rounded(size) : 0;
}

CUresult device_alloc(uintptr_t *address, size_t size)
{
	size_t taken = take(size);

	if (!taken)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*address = new_range(size, RANGE_DEVICE);
	if (*address) {
		range_from(*address, RANGE_DEVICE)->taken = taken;
		return CUDA_SUCCESS;
	}
	backend->give_memory(taken);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult device_free(uintptr_t address)
{
	struct range *range = range_from(address, RANGE_DEVICE);

	if (!range)
		return CUDA_ERROR_INVALID_VALUE;
	if (range->pool)
		pool_got(range->pool, range->size);
	unmap_device(range);
	backend->give_memory(range->taken);
	remove_range(range);
	return CUDA_SUCCESS;
}

static void host_free(struct range *range)
{
	munmap((void *)range->base, rounded(range->size));
	remove_range(range);
}

void close_memory(CUdevice device)
{
	struct range *range;

	while ((range = first_range(RANGE_DEVICE, device)))
		device_free(range->base);
	close_opened(device);
	while ((range = first_range(RANGE_HOST, device)))
		host_free(range);
	while ((range = first_range(RANGE_REGISTERED, device)))
		remove_range(range);
}

API CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
	uintptr_t address;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!dptr || !bytesize)
		return leave(CUDA_ERROR_INVALID_VALUE);
	result = refuse_in_capture(context, false);
	if (result == CUDA_SUCCESS)
		result = device_alloc(&address, bytesize);
	if (result == CUDA_SUCCESS)
		*dptr = address;
	return leave(result);
}

API CUresult cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
				unsigned int ElementSizeBytes)
{
	size_t pitch = (WidthInBytes + PITCH_ALIGNMENT - 1) / PITCH_ALIGNMENT * PITCH_ALIGNMENT;

	if (!pPitch || !WidthInBytes || !Height ||
	    (ElementSizeBytes != 4 && ElementSizeBytes != 8 && ElementSizeBytes != 16))
		return CUDA_ERROR_INVALID_VALUE;
	*pPitch = pitch;
	return cuMemAlloc_v2(dptr, pitch * Height);
}

/* Waits for all work, whatever uses the memory: programs rely on it. */
API CUresult cuMemFree_v2(CUdeviceptr dptr)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!dptr)
		return leave(CUDA_SUCCESS);
	if (!range_from(dptr, RANGE_DEVICE))
		return leave(CUDA_ERROR_INVALID_VALUE);
	result = refuse_in_capture(context, false);
	if (result == CUDA_SUCCESS)
		result = wait_for_all(context);
	return leave(result == CUDA_SUCCESS ? device_free(dptr) : result);
}

API CUresult cuMemGetInfo_v2(size_t *free, size_t *total)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (free)
		*free = backend->free_memory();
	if (total)
		*total = backend->total_memory();
	return leave(CUDA_SUCCESS);
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
	struct range *range;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	range = range_at(dptr, RANGE_DEVICE, RANGE_REGISTERED);
	if (!range)
		range = range_at(dptr, RANGE_MAPPED, RANGE_MAPPED);
	if (!range)
		return leave(CUDA_ERROR_NOT_FOUND);
	if (pbase)
		*pbase = range->base;
	if (psize)
		*psize = range->size;
	return leave(CUDA_SUCCESS);
}

API CUresult cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags)
{
	CUcontext context;
	CUresult result = enter(&context);

	(void)Flags;
	if (result != CUDA_SUCCESS)
		return result;
	if (!pp || !bytesize)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*pp = (void *)new_range(bytesize, RANGE_HOST);
	result = leave(*pp ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
	gate_keep(GATE_HOST);
	return result;
}

API CUresult cuMemAllocHost_v2(void **pp, size_t bytesize)
{
	return cuMemHostAlloc(pp, bytesize, 0);
}

API CUresult cuMemFreeHost(void *p)
{
	struct range *range;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!range_from((uintptr_t)p, RANGE_HOST))
		return leave(CUDA_ERROR_INVALID_VALUE);
	result = wait_for_all(context);
	/* Looked up again: the lock was given up in the wait. */
	range = range_from((uintptr_t)p, RANGE_HOST);
	if (result != CUDA_SUCCESS || !range)
		return leave(result ? result : CUDA_ERROR_INVALID_VALUE);
	host_free(range);
	return leave(CUDA_SUCCESS);
}

API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int Flags)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!pdptr || Flags || !range_at((uintptr_t)p, RANGE_HOST, RANGE_REGISTERED))
		return leave(CUDA_ERROR_INVALID_VALUE);
	*pdptr = (CUdeviceptr)p;
	return leave(CUDA_SUCCESS);
}

API CUresult cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags)
{
	struct range range = {
		.base = (uintptr_t)p,
		.size = bytesize,
		.kind = RANGE_REGISTERED,
		.readable = true,
		.writable = !(Flags & CU_MEMHOSTREGISTER_READ_ONLY),
	};
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!p || !bytesize)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (!is_range_free(range.base, bytesize, RANGE_REGISTERED))
		return leave(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
	/* Measured: pages under a guard cannot be registered. */
	if (!is_range_free(range.base, bytesize, RANGE_SPARSE))
		return leave(CUDA_ERROR_INVALID_VALUE);
	result = leave(add_range(range));
	gate_keep(GATE_HOST);
	return result;
}

#undef cuMemHostRegister
API CUresult cuMemHostRegister(void *p, size_t bytesize, unsigned int Flags);
API CUresult cuMemHostRegister(void *p, size_t bytesize, unsigned int Flags)
{
	return cuMemHostRegister_v2(p, bytesize, Flags);
}

API CUresult cuMemHostUnregister(void *p)
{
	struct range *range;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	range = range_from((uintptr_t)p, RANGE_REGISTERED);
	if (!range)
		return leave(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
	remove_range(range);
	return leave(CUDA_SUCCESS);
}
