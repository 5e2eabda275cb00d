// SPDX-License-Identifier: GPL-2.0 OR MIT
/* What the GPU is: identity, classes, sizes. One of Turing's classes, for it has few special ways. */
#include <linux/dma-mapping.h>
#include <linux/pci.h>
#include <linux/string.h>

#include "clc46f.h"
#include "clc5b5.h"
#include "ctrl2080mc.h"

#include "gpu.h"

/* QEMU's "pci-testdev": DMA mappings need some device, and nothing is ever asked of it. */
#define SOME_VENDOR 0x1b36
#define SOME_DEVICE 0x0005
/* TURING_COMPUTE_A; UVM's folder has no header of it. */
#define COMPUTE_CLASS 0xc5c0

const NvProcessorUuid gpu_uuid = { .uuid = "mpsd software 0" };

static struct pci_dev *pci;
static int handle;

NV_STATUS nvUvmInterfaceRegisterGpu(const NvProcessorUuid *uuid, UvmGpuPlatformInfo *platform)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceRegisterGpu);
	if (memcmp(uuid, &gpu_uuid, sizeof(gpu_uuid)))
		return NV_ERR_INVALID_DEVICE;
	pci = pci_get_device(SOME_VENDOR, SOME_DEVICE, NULL);
	if (!pci || dma_set_mask_and_coherent(&pci->dev, DMA_BIT_MASK(47)))
		return NV_ERR_INVALID_DEVICE;
	platform->pci_dev = pci;
	platform->dma_addressable_start = 0;
	platform->dma_addressable_limit = DMA_BIT_MASK(47);
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceRegisterGpu);

void nvUvmInterfaceUnregisterGpu(const NvProcessorUuid *uuid)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceUnregisterGpu);
	pci_dev_put(pci);
	pci = NULL;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceUnregisterGpu);

NV_STATUS nvUvmInterfaceGetGpuInfo(const NvProcessorUuid *uuid, const UvmGpuClientInfo *client,
				   UvmGpuInfo *info)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceGetGpuInfo);
	memset(info, 0, sizeof(*info));
	strscpy(info->name, "mpsd software GPU", sizeof(info->name));
	info->uuid = gpu_uuid;
	info->gpuArch = NV2080_CTRL_MC_ARCH_INFO_ARCHITECTURE_TU100;
	info->hostClass = TURING_CHANNEL_GPFIFO_A;
	info->ceClass = TURING_DMA_COPY_A;
	info->computeClass = COMPUTE_CLASS;
	info->subdeviceCount = 1;
	info->virtMode = UVM_VIRT_MODE_NONE;
	info->isSimulated = NV_TRUE;
	info->gpcCount = info->maxGpcCount = 2;
	info->tpcCount = 4;
	info->maxTpcPerGpcCount = 2;
	info->sysmemLink = UVM_LINK_TYPE_PCIE;
	info->sysmemLinkRateMBps = 1000;
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceGetGpuInfo);

NV_STATUS nvUvmInterfaceDeviceCreate(uvmGpuSessionHandle session, const UvmGpuInfo *info,
				     const NvProcessorUuid *uuid, uvmGpuDeviceHandle *device,
				     NvBool partition)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceDeviceCreate);
	if (partition)
		return NV_ERR_NOT_SUPPORTED;
	*device = (uvmGpuDeviceHandle)&handle;
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceDeviceCreate);

void nvUvmInterfaceDeviceDestroy(uvmGpuDeviceHandle device)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceDeviceDestroy);
}
MPSD_STUB_ANSWERS(nvUvmInterfaceDeviceDestroy);

NV_STATUS nvUvmInterfaceQueryCaps(uvmGpuDeviceHandle device, UvmGpuCaps *caps)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceQueryCaps);
	memset(caps, 0, sizeof(*caps));
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceQueryCaps);

/* One copy engine, not tied to graphics, that reaches everything. */
NV_STATUS nvUvmInterfaceQueryCopyEnginesCaps(uvmGpuDeviceHandle device, UvmGpuCopyEnginesCaps *caps)
{
	UvmGpuCopyEngineCaps *first = &caps->copyEngineCaps[0];

	mpsd_stub_answered(CALL_nvUvmInterfaceQueryCopyEnginesCaps);
	memset(caps, 0, sizeof(*caps));
	first->supported = NV_TRUE;
	first->sysmem = first->sysmemRead = first->sysmemWrite = NV_TRUE;
	first->p2p = NV_TRUE;
	first->cePceMask = 1;
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceQueryCopyEnginesCaps);

NV_STATUS nvUvmInterfaceGetFbInfo(uvmGpuDeviceHandle device, UvmGpuFbInfo *info)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceGetFbInfo);
	memset(info, 0, sizeof(*info));
	info->heapSize = GPU_VIDMEM_BYTES >> 10;
	info->maxAllocatableAddress = GPU_VIDMEM_BYTES - 1;
#ifdef MPSD_RM_VIDMEM_PAGES
	info->maxVidmemPageSize = GPU_CHUNK;
#endif
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceGetFbInfo);

NV_STATUS nvUvmInterfaceGetEccInfo(uvmGpuDeviceHandle device, UvmGpuEccInfo *info)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceGetEccInfo);
	memset(info, 0, sizeof(*info));
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceGetEccInfo);

NV_STATUS nvUvmInterfaceServiceDeviceInterruptsRM(uvmGpuDeviceHandle device)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceServiceDeviceInterruptsRM);
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceServiceDeviceInterruptsRM);
