// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Fault buffers. A test writes packets, as the memory management unit would; the hardware's thread
 * keeps raising the interrupt while one is unread. Access counters exist and never count.
 */
#include <linux/string.h>
#include <linux/vmalloc.h>

#include "gpu.h"

#define ENTRIES 1024
#define PACKET_WORDS 8
#define PACKET_BYTES (PACKET_WORDS * sizeof(u32))
#define SHADOWS 64
/* GET holds flags above the index, which are cleared by writing them. */
#define GET_INDEX 19 : 0
/* Bits of a packet's last word (class C369, "BUF_ENTRY"). */
#define PACKET_REPLAYABLE (1u << 7)
#define PACKET_CLIENT 8
#define PACKET_ACCESS 16
#define PACKET_HUB (1u << 20)
#define PACKET_GPC 24
#define PACKET_REPLAY_ENABLED (1u << 30)
#define PACKET_VALID (1u << 31)
#define INTERRUPT 1
#define BUFFER_HANDLE 1

enum { GET, PUT, INTR, ENABLE, DISABLE, PREFETCH, REGISTERS };

static DEFINE_MUTEX(lock);
static bool open, masked;
static volatile u32 registers[REGISTERS];
static volatile u32 counters[REGISTERS];
static u32 (*buffer)[PACKET_WORDS];
static u32 (*counts)[PACKET_WORDS];
static u32 shadow[SHADOWS][PACKET_WORDS];
static u32 shadows;

static void encode(const struct gpu_fault *fault, u32 *packet)
{
	/* Instance blocks are in video memory, aperture 0. */
	packet[0] = lower_32_bits(fault->instance) & ~0xfffu;
	packet[1] = upper_32_bits(fault->instance);
	packet[2] = lower_32_bits(fault->address) & ~0xfffu;
	packet[3] = upper_32_bits(fault->address);
	packet[4] = lower_32_bits(fault->timestamp);
	packet[5] = upper_32_bits(fault->timestamp);
	packet[6] = fault->engine;
	packet[7] = fault->type | fault->client << PACKET_CLIENT | fault->access << PACKET_ACCESS |
		    fault->gpc << PACKET_GPC | PACKET_REPLAY_ENABLED | PACKET_VALID |
		    (fault->hub ? PACKET_HUB : 0) | (fault->replayable ? PACKET_REPLAYABLE : 0);
}

/* The word with the valid bit comes last, PUT after it. */
static int put(const u32 *packet)
{
	u32 at = registers[PUT], next = (at + 1) % ENTRIES;

	if (next == FIELD_OF(registers[GET], GET_INDEX))
		return -ENOSPC;
	memcpy(buffer[at], packet, PACKET_BYTES - sizeof(u32));
	smp_wmb();
	WRITE_ONCE(buffer[at][PACKET_WORDS - 1], packet[PACKET_WORDS - 1]);
	smp_wmb();
	registers[PUT] = next;
	return 0;
}

static int put_shadow(const u32 *packet)
{
	if (shadows == SHADOWS)
		return -ENOSPC;
	memcpy(shadow[shadows++], packet, PACKET_BYTES);
	return 0;
}

int gpu_fault(const struct gpu_fault *fault)
{
	u32 packet[PACKET_WORDS];
	int error = -ENODEV;

	encode(fault, packet);
	mutex_lock(&lock);
	if (open)
		error = fault->replayable ? put(packet) : put_shadow(packet);
	if (!error)
		gpu_did(GPU_FAULTED, fault->address, 0, fault->engine, fault->replayable);
	mutex_unlock(&lock);
	return error;
}

void gpu_faults_mask(bool mask)
{
	mutex_lock(&lock);
	masked = mask;
	mutex_unlock(&lock);
}

void gpu_faults_interrupt(void)
{
	const struct UvmOpsUvmEvents *events = mpsd_stub_callbacks();

	mutex_lock(&lock);
	if (open && !masked && events && (FIELD_OF(registers[GET], GET_INDEX) != registers[PUT] || shadows))
		events->isrTopHalf(&gpu_uuid);
	mutex_unlock(&lock);
}

NV_STATUS nvUvmInterfaceInitFaultInfo(uvmGpuDeviceHandle device, UvmGpuFaultInfo *info)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceInitFaultInfo);
	memset(info, 0, sizeof(*info));
	info->replayable.pFaultBufferGet = &registers[GET];
	info->replayable.pFaultBufferPut = &registers[PUT];
	info->replayable.pPmcIntr = &registers[INTR];
	info->replayable.pPmcIntrEnSet = &registers[ENABLE];
	info->replayable.pPmcIntrEnClear = &registers[DISABLE];
	info->replayable.pPrefetchCtrl = &registers[PREFETCH];
	info->replayable.replayableFaultMask = INTERRUPT;
	info->replayable.bufferAddress = buffer;
	info->replayable.bufferSize = ENTRIES * PACKET_BYTES;
	info->nonReplayable.shadowBufferAddress = shadow;
	info->nonReplayable.bufferSize = sizeof(shadow);
	info->faultBufferHandle = BUFFER_HANDLE;
	mutex_lock(&lock);
	registers[GET] = registers[PUT] = 0;
	shadows = 0;
	open = true;
	mutex_unlock(&lock);
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceInitFaultInfo);

NV_STATUS nvUvmInterfaceDestroyFaultInfo(uvmGpuDeviceHandle device, UvmGpuFaultInfo *info)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceDestroyFaultInfo);
	mutex_lock(&lock);
	open = false;
	mutex_unlock(&lock);
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceDestroyFaultInfo);

NV_STATUS nvUvmInterfaceOwnPageFaultIntr(uvmGpuDeviceHandle device, NvBool own)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceOwnPageFaultIntr);
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceOwnPageFaultIntr);

/* Called by UVM's interrupt handler, so by gpu_faults_interrupt() with the lock held: one word, no lock. */
NV_STATUS nvUvmInterfaceHasPendingNonReplayableFaults(UvmGpuFaultInfo *info, NvBool *pending)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceHasPendingNonReplayableFaults);
	*pending = READ_ONCE(shadows) != 0;
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceHasPendingNonReplayableFaults);

NV_STATUS nvUvmInterfaceGetNonReplayableFaults(UvmGpuFaultInfo *info, void *copy, NvU32 *count)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceGetNonReplayableFaults);
	mutex_lock(&lock);
	memcpy(copy, shadow, shadows * PACKET_BYTES);
	*count = shadows;
	WRITE_ONCE(shadows, 0);
	mutex_unlock(&lock);
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceGetNonReplayableFaults);

NV_STATUS nvUvmInterfaceReportNonReplayableFault(uvmGpuDeviceHandle device, const void *packet)
{
	const u32 *words = packet;

	mpsd_stub_answered(CALL_nvUvmInterfaceReportNonReplayableFault);
	gpu_did(GPU_REPORTED, words[2] | (u64)words[3] << 32, 0, words[6], 0);
	gpu_accesses_drop(words[2] | (u64)words[3] << 32);
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceReportNonReplayableFault);

NV_STATUS nvUvmInterfaceInitAccessCntrInfo(uvmGpuDeviceHandle device, UvmGpuAccessCntrInfo *info, NvU32 index)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceInitAccessCntrInfo);
	memset(info, 0, sizeof(*info));
	info->pAccessCntrBufferGet = &counters[GET];
	info->pAccessCntrBufferPut = &counters[PUT];
	info->pAccessCntrBufferFull = &counters[PREFETCH];
	info->pHubIntr = &counters[INTR];
	info->pHubIntrEnSet = &counters[ENABLE];
	info->pHubIntrEnClear = &counters[DISABLE];
	info->accessCounterMask = INTERRUPT;
	info->bufferAddress = counts;
	info->bufferSize = ENTRIES * PACKET_BYTES;
	info->accessCntrBufferHandle = BUFFER_HANDLE;
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceInitAccessCntrInfo);

NV_STATUS nvUvmInterfaceDestroyAccessCntrInfo(uvmGpuDeviceHandle device, UvmGpuAccessCntrInfo *info)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceDestroyAccessCntrInfo);
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceDestroyAccessCntrInfo);

NV_STATUS nvUvmInterfaceEnableAccessCntr(uvmGpuDeviceHandle device, UvmGpuAccessCntrInfo *info,
					 UvmGpuAccessCntrConfig *config)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceEnableAccessCntr);
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceEnableAccessCntr);

NV_STATUS nvUvmInterfaceDisableAccessCntr(uvmGpuDeviceHandle device, UvmGpuAccessCntrInfo *info)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceDisableAccessCntr);
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceDisableAccessCntr);

int gpu_faults_open(void)
{
	buffer = vzalloc(ENTRIES * PACKET_BYTES);
	counts = vzalloc(ENTRIES * PACKET_BYTES);
	return buffer && counts ? 0 : -ENOMEM;
}

void gpu_faults_close(void)
{
	vfree(buffer);
	vfree(counts);
}
