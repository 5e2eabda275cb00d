// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Memory. Video memory is one block; its pages are given out in chunks of 2 MiB. What RM allocates
 * for UVM is memory of its own at addresses that are never used again, so a late access is noticed.
 */
#include <linux/bitmap.h>
#include <linux/io.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "gpu.h"

#define CHUNKS (GPU_VIDMEM_BYTES / GPU_CHUNK)
/* Below 2^40, which is as far as Turing's host units reach. */
#define FIRST_ADDRESS (1ull << 32)

struct allocation {
	struct list_head node;
	u64 address, bytes;
	void *memory;
};

static LIST_HEAD(allocations);
static DEFINE_SPINLOCK(allocations_lock);
static u64 next_address = FIRST_ADDRESS;

static void *vidmem;
static DECLARE_BITMAP(chunks, CHUNKS);
static DEFINE_MUTEX(chunks_lock);
static UvmPmaStatistics statistics;

static struct allocation *find(u64 address, u64 bytes)
{
	struct allocation *one;

	list_for_each_entry(one, &allocations, node)
		if (address >= one->address && address + bytes <= one->address + one->bytes)
			return one;
	return NULL;
}

static void *allocated(u64 address, u64 bytes)
{
	struct allocation *one;
	void *found = NULL;

	spin_lock(&allocations_lock);
	one = find(address, bytes);
	if (one)
		found = one->memory + (address - one->address);
	spin_unlock(&allocations_lock);
	return found;
}

static void *mapped(u64 address, u64 bytes)
{
	const struct gpu_space *space;
	void *found = NULL;
	u64 physical;
	bool sysmem;

	mutex_lock(&gpu_spaces_lock);
	space = gpu_space_internal();
	if (space && gpu_translate(space, address, &physical, &sysmem))
		found = gpu_physical(physical, sysmem, bytes);
	mutex_unlock(&gpu_spaces_lock);
	return found;
}

void *gpu_virtual(u64 address, u64 bytes)
{
	void *found = allocated(address, bytes);

	return found ? found : mapped(address, bytes);
}

void *gpu_physical(u64 address, bool sysmem, u64 bytes)
{
	if (!sysmem)
		return address + bytes <= GPU_VIDMEM_BYTES ? vidmem + address : NULL;
	/* The emulated machine has no IOMMU: a DMA address is a physical one. */
	return pfn_valid(PHYS_PFN(address)) ? phys_to_virt(address) : NULL;
}

void *gpu_allocate(u64 bytes, u64 alignment, u64 *address)
{
	struct allocation *one = kzalloc(sizeof(*one), GFP_KERNEL);

	if (!one)
		return NULL;
	one->bytes = PAGE_ALIGN(bytes);
	one->memory = vzalloc(one->bytes);
	if (!one->memory) {
		kfree(one);
		return NULL;
	}
	spin_lock(&allocations_lock);
	one->address = ALIGN(next_address, max_t(u64, alignment, GPU_BIG_PAGE));
	next_address = one->address + one->bytes;
	list_add(&one->node, &allocations);
	spin_unlock(&allocations_lock);
	*address = one->address;
	return one->memory;
}

void gpu_release(u64 address)
{
	struct allocation *one;

	spin_lock(&allocations_lock);
	one = find(address, 1);
	if (one)
		list_del(&one->node);
	spin_unlock(&allocations_lock);
	if (WARN_ON(!one))
		return;
	vfree(one->memory);
	kfree(one);
}

static NV_STATUS allocate(NvLength bytes, UvmGpuPointer *address, UvmGpuAllocInfo *info)
{
	u64 found;

	if (!gpu_allocate(bytes, info->alignment, &found))
		return NV_ERR_NO_MEMORY;
	*address = found;
	return NV_OK;
}

NV_STATUS nvUvmInterfaceMemoryAllocSys(uvmGpuAddressSpaceHandle space, NvLength bytes,
				       UvmGpuPointer *address, UvmGpuAllocInfo *info)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceMemoryAllocSys);
	return allocate(bytes, address, info);
}
MPSD_STUB_ANSWERS(nvUvmInterfaceMemoryAllocSys);

NV_STATUS nvUvmInterfaceMemoryAllocFB(uvmGpuAddressSpaceHandle space, NvLength bytes,
				      UvmGpuPointer *address, UvmGpuAllocInfo *info)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceMemoryAllocFB);
	return allocate(bytes, address, info);
}
MPSD_STUB_ANSWERS(nvUvmInterfaceMemoryAllocFB);

void nvUvmInterfaceMemoryFree(uvmGpuAddressSpaceHandle space, UvmGpuPointer address)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceMemoryFree);
	gpu_release(address);
}
MPSD_STUB_ANSWERS(nvUvmInterfaceMemoryFree);

NV_STATUS nvUvmInterfaceMemoryCpuMap(uvmGpuAddressSpaceHandle space, UvmGpuPointer address,
				     NvLength bytes, void **mapped, NvU64 page)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceMemoryCpuMap);
	*mapped = gpu_virtual(address, bytes);
	return *mapped ? NV_OK : NV_ERR_INVALID_ADDRESS;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceMemoryCpuMap);

void nvUvmInterfaceMemoryCpuUnMap(uvmGpuAddressSpaceHandle space, void *mapped)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceMemoryCpuUnMap);
}
MPSD_STUB_ANSWERS(nvUvmInterfaceMemoryCpuUnMap);

NV_STATUS nvUvmInterfaceGetPmaObject(uvmGpuDeviceHandle device, void **pma,
				     const UvmPmaStatistics **public)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceGetPmaObject);
	*pma = chunks;
	*public = &statistics;
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceGetPmaObject);

/* There is nobody else who could need the memory: UVM is never asked to give any back. */
NV_STATUS nvUvmInterfacePmaRegisterEvictionCallbacks(void *pma, uvmPmaEvictPagesCallback pages,
						     uvmPmaEvictRangeCallback range, void *data)
{
	mpsd_stub_answered(CALL_nvUvmInterfacePmaRegisterEvictionCallbacks);
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfacePmaRegisterEvictionCallbacks);

void nvUvmInterfacePmaUnregisterEvictionCallbacks(void *pma)
{
	mpsd_stub_answered(CALL_nvUvmInterfacePmaUnregisterEvictionCallbacks);
}
MPSD_STUB_ANSWERS(nvUvmInterfacePmaUnregisterEvictionCallbacks);

static void count_free(void)
{
	u64 left = CHUNKS - bitmap_weight(chunks, CHUNKS);

	statistics.numPages2m = CHUNKS;
	statistics.numFreePages2m = left;
	statistics.numFreePages64k = left * (GPU_CHUNK / GPU_BIG_PAGE);
}

/* False: so many free chunks in a row there are not. */
static bool take(u64 *page, unsigned int length)
{
	unsigned long first = bitmap_find_next_zero_area(chunks, CHUNKS, 0, length, 0);

	if (first >= CHUNKS)
		return false;
	bitmap_set(chunks, first, length);
	*page = first * GPU_CHUNK;
	return true;
}

static void give_back(const u64 *pages, unsigned int runs, unsigned int length)
{
	while (runs--)
		bitmap_clear(chunks, pages[runs] / GPU_CHUNK, length);
}

/* UVM asks for chunks of 2 MiB, one or several; contiguous ones have one address. */
NV_STATUS nvUvmInterfacePmaAllocPages(void *pma, NvLength count, NvU64 size,
				      UvmPmaAllocationOptions *options, NvU64 *pages)
{
	bool contiguous = options->flags & UVM_PMA_ALLOCATE_CONTIGUOUS;
	unsigned int runs = contiguous ? 1 : count, length = contiguous ? count : 1, run = 0;

	mpsd_stub_answered(CALL_nvUvmInterfacePmaAllocPages);
	if (size != GPU_CHUNK)
		return NV_ERR_NOT_SUPPORTED;
	mutex_lock(&chunks_lock);
	while (run < runs && take(&pages[run], length))
		run++;
	if (run < runs)
		give_back(pages, run, length);
	count_free();
	mutex_unlock(&chunks_lock);
	options->resultFlags = 0;
	return run < runs ? NV_ERR_NO_MEMORY : NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfacePmaAllocPages);

void nvUvmInterfacePmaFreePages(void *pma, NvU64 *pages, NvLength count, NvU64 size, NvU32 flags)
{
	bool contiguous = flags & UVM_PMA_ALLOCATE_CONTIGUOUS;

	mpsd_stub_answered(CALL_nvUvmInterfacePmaFreePages);
	mutex_lock(&chunks_lock);
	give_back(pages, contiguous ? 1 : count, contiguous ? count : 1);
	count_free();
	mutex_unlock(&chunks_lock);
}
MPSD_STUB_ANSWERS(nvUvmInterfacePmaFreePages);

NV_STATUS nvUvmInterfacePmaPinPages(void *pma, NvU64 *pages, NvLength count, NvU64 size, NvU32 flags)
{
	mpsd_stub_answered(CALL_nvUvmInterfacePmaPinPages);
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfacePmaPinPages);

int gpu_memory_open(void)
{
	vidmem = vzalloc(GPU_VIDMEM_BYTES);
	count_free();
	return vidmem ? 0 : -ENOMEM;
}

void gpu_memory_close(void)
{
	WARN_ON(!list_empty(&allocations));
	WARN_ON(!bitmap_empty(chunks, CHUNKS));
	vfree(vidmem);
}
