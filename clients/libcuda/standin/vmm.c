// SPDX-License-Identifier: MIT
/*
 * Virtual memory management: physical memory is a memfd, a mapping is an mmap of it in the alias of
 * its reservation (reserve.c). So a handle that left the process as a descriptor is as alive as that
 * descriptor, and mapped memory is the GPU's alone, both as on a GPU.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "standin.h"

#define NAME "mpsd-standin-vmm"

struct physical {
	struct physical *next;
	int fd;
	size_t size;
	unsigned int references;	/* handles */
	unsigned int mappings;
	bool ours;			/* counted against this process, as memory of the GPU */
	bool exportable;
	CUmemLocation location;
};

static struct physical *physicals;

/*
 * Driver 580 does not protect one handle's books when one thread unmaps it and another exports it or lets go of
 * it (seen: freed twice). Nor are these words protected, for ThreadSanitizer to see.
 */
static unsigned int unprotected[64];

static void touch(CUmemGenericAllocationHandle handle)
{
	unprotected[handle / 64 % 64]++;
}

static struct physical *find(CUmemGenericAllocationHandle handle)
{
	struct physical *physical = physicals;

	while (physical && (uintptr_t)physical != handle)
		physical = physical->next;
	return physical && physical->references ? physical : NULL;
}

static void put(struct physical *physical)
{
	struct physical **link = &physicals;

	if (physical->references || physical->mappings)
		return;
	while (*link != physical)
		link = &(*link)->next;
	*link = physical->next;
	if (physical->ours)
		backend->give_memory(physical->size);
	close(physical->fd);
	free(physical);
}

/* At the end of the library: whatever is left of mappings went with the reservations. */
void close_physical(void)
{
	struct physical *physical;

	while ((physical = physicals)) {
		physical->references = physical->mappings = 0;
		put(physical);
	}
}

CUdevice physical_device(const struct physical *physical)
{
	return physical->location.id;
}

static CUresult add(int fd, size_t size, bool ours, bool exportable, CUmemGenericAllocationHandle *handle)
{
	struct physical *physical = malloc(sizeof(*physical));

	if (!physical)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*physical = (struct physical){ physicals, fd, size, 1, 0, ours, exportable,
					{ .type = CU_MEM_LOCATION_TYPE_DEVICE } };
	physicals = physical;
	*handle = (uintptr_t)physical;
	return CUDA_SUCCESS;
}

static bool is_of_host(const CUmemLocation *location)
{
	return location->type == CU_MEM_LOCATION_TYPE_HOST || location->type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
}

/* The host is one NUMA node. */
static bool is_location(const CUmemLocation *location)
{
	if (location->type == CU_MEM_LOCATION_TYPE_DEVICE)
		return is_device(location->id);
	return location->type == CU_MEM_LOCATION_TYPE_HOST ||
	       (location->type == CU_MEM_LOCATION_TYPE_HOST_NUMA && location->id == 0);
}

static bool is_valid(const CUmemAllocationProp *prop)
{
	return prop && prop->type == CU_MEM_ALLOCATION_TYPE_PINNED && is_location(&prop->location) &&
	       (prop->location.type != CU_MEM_LOCATION_TYPE_HOST || !prop->requestedHandleTypes) &&
	       (prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE ||
		prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

API CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
					   CUmemAllocationGranularity_flags option)
{
	CUresult result = is_initialised();

	if (result != CUDA_SUCCESS)
		return result;
	if (!granularity || !is_valid(prop) || (unsigned int)option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
		return CUDA_ERROR_INVALID_VALUE;
	*granularity = GRANULARITY;
	return CUDA_SUCCESS;
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
			 unsigned long long flags)
{
	CUresult result = is_initialised();
	bool ours;
	int fd;

	if (result != CUDA_SUCCESS)
		return result;
	if (!handle || !size || size % GRANULARITY || !is_valid(prop) || flags)
		return CUDA_ERROR_INVALID_VALUE;
	ours = !is_of_host(&prop->location);
	pthread_mutex_lock(&gpu_lock);
	if (ours && !backend->take_memory(size))
		return leave(CUDA_ERROR_OUT_OF_MEMORY);
	fd = memfd_create(NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0 || ftruncate(fd, (off_t)size) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW))
		result = CUDA_ERROR_OUT_OF_MEMORY;
	if (result == CUDA_SUCCESS)
		result = add(fd, size, ours, prop->requestedHandleTypes != 0, handle);
	if (result == CUDA_SUCCESS)
		physicals->location = prop->location;
	if (result != CUDA_SUCCESS) {
		if (ours)
			backend->give_memory(size);
		if (fd >= 0)
			close(fd);
	}
	leave(result);
	if (!ours)
		gate_keep(GATE_HOST);
	return result;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
	struct physical *physical;

	touch(handle);
	pthread_mutex_lock(&gpu_lock);
	physical = find(handle);
	if (!physical)
		return leave(CUDA_ERROR_INVALID_VALUE);
	physical->references--;
	put(physical);
	return leave(CUDA_SUCCESS);
}

API CUresult cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
					  CUmemAllocationHandleType handleType, unsigned long long flags)
{
	struct physical *physical;
	int fd;

	if (!shareableHandle || handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags)
		return CUDA_ERROR_INVALID_VALUE;
	touch(handle);
	pthread_mutex_lock(&gpu_lock);
	physical = find(handle);
	if (!physical || !physical->exportable)
		return leave(CUDA_ERROR_INVALID_VALUE);
	fd = fcntl(physical->fd, F_DUPFD_CLOEXEC, 0);
	if (fd < 0)
		return leave(CUDA_ERROR_OPERATING_SYSTEM);
	manager_see(fd);
	*(int *)shareableHandle = fd;
	return leave(CUDA_SUCCESS);
}

/* The descriptor stays the caller's. */
API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
					    CUmemAllocationHandleType shHandleType)
{
	int given = (int)(intptr_t)osHandle, fd;
	struct stat status;
	CUresult result;

	if (!handle || shHandleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_INVALID_VALUE;
	if (fcntl(given, F_GET_SEALS) != (F_SEAL_SHRINK | F_SEAL_GROW) || fstat(given, &status))
		return CUDA_ERROR_INVALID_VALUE;
	manager_see(given);
	fd = fcntl(given, F_DUPFD_CLOEXEC, 0);
	if (fd < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	pthread_mutex_lock(&gpu_lock);
	/* Measured: what was imported cannot be exported again. */
	result = add(fd, (size_t)status.st_size, false, false, handle);
	if (result != CUDA_SUCCESS)
		close(fd);
	return leave(result);
}

void lock_memory(void)
{
	pthread_rwlock_wrlock(&gpu_memory);
	pthread_mutex_lock(&gpu_lock);
}

CUresult leave_memory(CUresult result)
{
	pthread_mutex_unlock(&gpu_lock);
	pthread_rwlock_unlock(&gpu_memory);
	return result;
}

API CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
		      unsigned long long flags)
{
	struct physical *physical;
	struct range *reserved;
	CUresult result;

	if (!size || size % GRANULARITY || offset || ptr % GRANULARITY || flags)
		return CUDA_ERROR_INVALID_VALUE;
	lock_memory();
	physical = find(handle);
	reserved = range_at(ptr, RANGE_RESERVED, RANGE_RESERVED);
	if (!physical || size != physical->size || !reserved ||
	    ptr + size > reserved->base + reserved->size || !is_range_free(ptr, size, RANGE_MAPPED) ||
	    !is_range_free(ptr, size, RANGE_MANAGED) || !is_range_free(ptr, size, RANGE_SPARSE))
		return leave_memory(CUDA_ERROR_INVALID_VALUE);
	if (mmap(gpu_pointer(ptr), size, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->fd, 0) == MAP_FAILED)
		return leave_memory(CUDA_ERROR_OUT_OF_MEMORY);
	result = add_range((struct range){
		.base = ptr, .size = size, .kind = RANGE_MAPPED, .physical = physical });
	if (result == CUDA_SUCCESS)
		physical->mappings++;
	return leave_memory(result);
}

/* A whole number of mappings, as the real driver wants it. */
static bool covers_whole_mappings(CUdeviceptr ptr, size_t size)
{
	CUdeviceptr at = ptr;

	while (at < ptr + size) {
		struct range *range = range_from(at, RANGE_MAPPED);

		if (!range || range->size > ptr + size - at)
			return false;
		at += range->size;
	}
	return size != 0;
}

/* The host may have access to its own memory, but here its threads do not see it at that address. */
static bool is_access(const CUmemAccessDesc *desc)
{
	return is_location(&desc->location);
}

/* What one device may write all that may access it may: the host's page tables are one for all. */
static CUresult set_access(struct range *range, const CUmemAccessDesc *desc)
{
	int protection = PROT_NONE;

	if (is_of_host(&desc->location))
		return is_of_host(&range->physical->location) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	if (desc->flags == CU_MEM_ACCESS_FLAGS_PROT_NONE)
		range->devices &= ~(1u << desc->location.id);
	else
		range->devices |= 1u << desc->location.id;
	if (range->devices && desc->flags == CU_MEM_ACCESS_FLAGS_PROT_NONE)
		return CUDA_SUCCESS;
	if (desc->flags & CU_MEM_ACCESS_FLAGS_PROT_READ)
		protection |= PROT_READ;
	if (desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
		protection |= PROT_WRITE;
	if (mprotect(gpu_pointer(range->base), range->size, protection))
		return CUDA_ERROR_OUT_OF_MEMORY;
	range->readable = protection & PROT_READ;
	range->writable = protection & PROT_WRITE;
	return CUDA_SUCCESS;
}

API CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
	CUresult result = CUDA_SUCCESS;

	for (size_t i = 0; desc && i < count; i++)
		if (!is_access(&desc[i]))
			return CUDA_ERROR_INVALID_VALUE;
	if (!desc || !count)
		return CUDA_ERROR_INVALID_VALUE;
	lock_memory();
	if (!covers_whole_mappings(ptr, size))
		return leave_memory(CUDA_ERROR_INVALID_VALUE);
	for (CUdeviceptr at = ptr; at < ptr + size && result == CUDA_SUCCESS;) {
		struct range *range = range_from(at, RANGE_MAPPED);

		for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
			result = set_access(range, &desc[i]);
		at += range->size;
	}
	return leave_memory(result);
}

API CUresult cuMemUnmap(CUdeviceptr ptr, size_t size)
{
	CUmemGenericAllocationHandle last = 0;

	gate_keep(GATE_UNMAP);
	gate_keep(GATE_MANAGER);
	if (gate_wants(GATE_NO_UNMAP))
		return CUDA_ERROR_UNKNOWN;
	lock_memory();
	if (!covers_whole_mappings(ptr, size))
		return leave_memory(CUDA_ERROR_INVALID_VALUE);
	mmap(gpu_pointer(ptr), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
	for (CUdeviceptr at = ptr; at < ptr + size;) {
		struct range *range = range_from(at, RANGE_MAPPED);
		struct physical *physical = range->physical;

		at += range->size;
		remove_range(range);
		physical->mappings--;
		last = (uintptr_t)physical;
		put(physical);
	}
	leave_memory(CUDA_SUCCESS);
	touch(last);
	return CUDA_SUCCESS;
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
	struct range *range;

	pthread_mutex_lock(&gpu_lock);
	range = range_at((uintptr_t)addr, RANGE_MAPPED, RANGE_MAPPED);
	if (!handle || !range)
		return leave(CUDA_ERROR_INVALID_VALUE);
	range->physical->references++;
	*handle = (uintptr_t)range->physical;
	return leave(CUDA_SUCCESS);
}

API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
	struct physical *physical;

	pthread_mutex_lock(&gpu_lock);
	physical = find(handle);
	if (!prop || !physical)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*prop = (CUmemAllocationProp){
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = physical->exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0,
		.location = physical->location,
	};
	return leave(CUDA_SUCCESS);
}

API CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr)
{
	struct range *range;

	if (!flags || !location)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&gpu_lock);
	range = range_at(ptr, RANGE_MAPPED, RANGE_MAPPED);
	if (!range)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*flags = range->writable   ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
		 : range->readable ? CU_MEM_ACCESS_FLAGS_PROT_READ
				   : CU_MEM_ACCESS_FLAGS_PROT_NONE;
	return leave(CUDA_SUCCESS);
}
