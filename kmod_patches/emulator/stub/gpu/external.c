// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Memory that clients have from RM, and what RM keeps for a channel: UVM maps both with entries that RM makes.
 * Any handle is some memory; it lies behind what UVM owns, and nobody reads it.
 */
#include "gpu.h"

/* Of a memory's handle: its pages, 0 4 KiB, 1 64 KiB, 2 2 MiB. */
#define HANDLE_PAGE 1 : 0
#define MEMORY_BYTES GPU_CHUNK
#define RESOURCE_ID 1

static u64 page_of(NvHandle memory)
{
	static const u64 sizes[] = { PAGE_SIZE, GPU_BIG_PAGE, GPU_CHUNK, GPU_CHUNK };

	return sizes[FIELD_OF(memory, HANDLE_PAGE)];
}

static void describe(UvmGpuMemoryInfo *info, u64 page, u64 bytes)
{
	memset(info, 0, sizeof(*info));
	info->deviceDescendant = NV_TRUE;
	info->pageSize = page;
	info->contig = NV_TRUE;
	info->physAddr = GPU_VIDMEM_BYTES;
	info->size = bytes;
	info->uuid = gpu_uuid;
}

NV_STATUS nvUvmInterfaceDupMemory(uvmGpuDeviceHandle device, NvHandle client, NvHandle memory,
				  NvHandle *duplicate, UvmGpuMemoryInfo *info)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceDupMemory);
	describe(info, page_of(memory), MEMORY_BYTES);
	*duplicate = memory;
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceDupMemory);

NV_STATUS nvUvmInterfaceFreeDupedHandle(uvmGpuDeviceHandle device, NvHandle duplicate)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceFreeDupedHandle);
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceFreeDupedHandle);

static u64 permissions(UvmRmGpuMappingType type)
{
	switch (type) {
	case UvmRmGpuMappingTypeReadOnly:
		return GPU_PTE_READ_ONLY | GPU_PTE_NO_ATOMICS;
	case UvmRmGpuMappingTypeReadWrite:
		return GPU_PTE_NO_ATOMICS;
	default:
		return 0;
	}
}

/* Turing's entries: 8 bytes, 16 where a page takes a directory's place. The address begins at bit 8. */
static NV_STATUS entries(u64 offset, u64 bytes, u64 page, UvmGpuExternalMappingInfo *info)
{
	u64 count = bytes / page, words = page == GPU_CHUNK ? 2 : 1, at;

	if (info->pteBufferSize < count * words * sizeof(u64))
		return NV_ERR_INVALID_ARGUMENT;
	memset(info->pteBuffer, 0, count * words * sizeof(u64));
	for (at = 0; at < count; at++)
		info->pteBuffer[at * words] = GPU_PTE_VALID | permissions(info->mappingType) |
				      (GPU_VIDMEM_BYTES + offset + at * page) >> 12 << 8;
	info->numWrittenPtes = count;
	info->numRemainingPtes = 0;
	info->pteSize = words * sizeof(u64);
	return NV_OK;
}

/* The mapping's page size is told where it is not that of the memory. */
NV_STATUS nvUvmInterfaceGetExternalAllocPtes(uvmGpuAddressSpaceHandle space, NvHandle memory, NvU64 offset,
					     NvU64 bytes, UvmGpuExternalMappingInfo *info)
{
	u64 page = info->mappingPageSize;

	mpsd_stub_answered(CALL_nvUvmInterfaceGetExternalAllocPtes);
	return entries(offset, bytes, page ? page : page_of(memory), info);
}
MPSD_STUB_ANSWERS(nvUvmInterfaceGetExternalAllocPtes);

NV_STATUS nvUvmInterfaceGetChannelResourcePtes(uvmGpuAddressSpaceHandle space, NvP64 descriptor, NvU64 offset,
					       NvU64 bytes, UvmGpuExternalMappingInfo *info)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceGetChannelResourcePtes);
	return entries(offset, bytes, info->mappingPageSize ? info->mappingPageSize : PAGE_SIZE, info);
}
MPSD_STUB_ANSWERS(nvUvmInterfaceGetChannelResourcePtes);

/* One context buffer of 64 KiB in pages of 4 KiB. */
void gpu_channel_resource(const void *descriptor, UvmGpuChannelInstanceInfo *info)
{
	UvmGpuChannelResourceInfo *resource = &info->resourceInfo[0];

	info->resourceCount = 1;
	resource->resourceDescriptor = (NvP64)descriptor;
	resource->resourceId = RESOURCE_ID;
	resource->alignment = GPU_BIG_PAGE;
	describe(&resource->resourceInfo, PAGE_SIZE, GPU_BIG_PAGE);
}
