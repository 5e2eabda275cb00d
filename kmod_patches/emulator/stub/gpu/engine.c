// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Runs what UVM pushes: the host's methods (semaphores, memory operations, clear faulted), the copy
 * engine's (fill, copy, semaphore), and the software object's (cancel by instance). Names and bits are
 * of the class headers in the driver's own tree. Whatever is not known is told as GPU_TROUBLE, never
 * passed over.
 */
#include <linux/ktime.h>
#include <linux/string.h>

#include "clc076.h"
#include "clc36f.h"
#include "clc3b5.h"
#include "clc46f.h"

#include "gpu.h"

/* As UVM binds them. */
#define SUBCHANNEL_COPY 4
#define SUBCHANNEL_SW 5
/* Below this address a method is the host's, whatever the subchannel. */
#define HOST_METHODS 0x100

static bool trouble(u32 subchannel, u32 method, u32 data)
{
	pr_err("mpsd-gpu: subchannel %u method %#x data %#x is not known\n", subchannel, method, data);
	gpu_did(GPU_TROUBLE, method, 0, subchannel, data);
	return true;
}

static void *target(u64 address, u64 bytes)
{
	void *found = gpu_virtual(address, bytes);

	if (!found)
		trouble(0, 0, address);
	return found;
}

static u64 pair(const u32 *words, u32 high, u32 low)
{
	return (u64)words[high / 4] << 32 | words[low / 4];
}

/* Four words: payload, 0, time in ns. */
static void release(u64 address, u32 payload, bool with_time)
{
	u32 *memory = target(address, with_time ? 16 : 4);

	if (!memory)
		return;
	if (with_time) {
		memory[1] = 0;
		*(u64 *)(memory + 2) = ktime_get_ns();
	}
	smp_store_release(memory, payload);
}

/* False: the value that is waited for is not there yet. */
static bool semaphore(struct gpu_channel *channel, u32 execute)
{
	u64 address = (FIELD_OF(channel->host[NVC46F_SEM_ADDR_HI / 4], NVC46F_SEM_ADDR_HI_OFFSET) << 32) |
		      (channel->host[NVC46F_SEM_ADDR_LO / 4] & ~3u);
	u32 payload = channel->host[NVC46F_SEM_PAYLOAD_LO / 4], *memory;

	switch (FIELD_OF(execute, NVC46F_SEM_EXECUTE_OPERATION)) {
	case NVC46F_SEM_EXECUTE_OPERATION_RELEASE:
		release(address, payload, FIELD_OF(execute, NVC46F_SEM_EXECUTE_RELEASE_TIMESTAMP));
		return true;
	case NVC46F_SEM_EXECUTE_OPERATION_ACQ_CIRC_GEQ:
		memory = target(address, 4);
		return !memory || (s32)(smp_load_acquire(memory) - payload) >= 0;
	}
	return trouble(0, NVC46F_SEM_EXECUTE, execute);
}

static void replay(const u32 *host, u32 d)
{
	u32 a = host[NVC46F_MEM_OP_A / 4], b = host[NVC46F_MEM_OP_B / 4], c = host[NVC46F_MEM_OP_C / 4];
	u64 page = FIELD_OF(a, NVC46F_MEM_OP_A_TLB_INVALIDATE_TARGET_ADDR_LO) | (u64)b << 20;
	u64 directory = FIELD_OF(c, NVC46F_MEM_OP_C_TLB_INVALIDATE_PDB_ADDR_LO) |
			FIELD_OF(d, NVC46F_MEM_OP_D_TLB_INVALIDATE_PDB_ADDR_HI) << 20;
	u32 kind = FIELD_OF(c, NVC46F_MEM_OP_C_TLB_INVALIDATE_REPLAY);

	switch (kind) {
	case NVC46F_MEM_OP_C_TLB_INVALIDATE_REPLAY_NONE:
		gpu_did(GPU_INVALIDATE, page << 12, directory << 12, 0, 0);
		return;
	case NVC46F_MEM_OP_C_TLB_INVALIDATE_REPLAY_START:
	case NVC46F_MEM_OP_C_TLB_INVALIDATE_REPLAY_START_ACK_ALL:
		gpu_did(GPU_REPLAY, 0, 0, kind, 0);
		gpu_accesses_replay();
		return;
	case NVC46F_MEM_OP_C_TLB_INVALIDATE_REPLAY_CANCEL_VA_GLOBAL:
		gpu_did(GPU_CANCEL_VA, page << 12, directory << 12,
			FIELD_OF(a, NVC46F_MEM_OP_A_TLB_INVALIDATE_CANCEL_MMU_ENGINE_ID),
			FIELD_OF(c, NVC46F_MEM_OP_C_TLB_INVALIDATE_ACCESS_TYPE));
		gpu_accesses_cancel_address(page << 12, directory << 12,
					    FIELD_OF(a, NVC46F_MEM_OP_A_TLB_INVALIDATE_CANCEL_MMU_ENGINE_ID));
		return;
	}
	trouble(0, NVC46F_MEM_OP_C, c);
}

static void memory_operation(const u32 *host, u32 d)
{
	switch (FIELD_OF(d, NVC46F_MEM_OP_D_OPERATION)) {
	case NVC46F_MEM_OP_D_OPERATION_MEMBAR:
	case NVC46F_MEM_OP_D_OPERATION_ACCESS_COUNTER_CLR:
		return;
	case NVC46F_MEM_OP_D_OPERATION_MMU_TLB_INVALIDATE:
	case NVC46F_MEM_OP_D_OPERATION_MMU_TLB_INVALIDATE_TARGETED:
		replay(host, d);
		return;
	}
	trouble(0, NVC46F_MEM_OP_D, d);
}

static bool host_method(struct gpu_channel *channel, u32 method, u32 data)
{
	channel->host[method / 4] = data;
	switch (method) {
	case NVC46F_SEM_EXECUTE:
		return semaphore(channel, data);
	case NVC46F_MEM_OP_D:
		memory_operation(channel->host, data);
		return true;
	case NVC46F_CLEAR_FAULTED:
		gpu_did(GPU_CLEAR_FAULTED, data, 0, 0, 0);
		gpu_accesses_resume(FIELD_OF(data, NVC46F_CLEAR_FAULTED_HANDLE));
		return true;
	case NVC46F_SET_OBJECT:
	case NVC46F_NOP:
	case NVC46F_WFI:
	case NVC46F_SEM_ADDR_LO:
	case NVC46F_SEM_ADDR_HI:
	case NVC46F_SEM_PAYLOAD_LO:
	case NVC46F_SEM_PAYLOAD_HI:
	case NVC46F_MEM_OP_A:
	case NVC46F_MEM_OP_B:
	case NVC46F_MEM_OP_C:
		return true;
	}
	return trouble(0, method, data);
}

/* One side of a transfer. */
struct side {
	u64 address;
	bool physical, sysmem;
};

static struct side side(const u32 *copy, u64 address, bool physical, u32 mode)
{
	bool sysmem = FIELD_OF(copy[mode / 4], NVC3B5_SET_DST_PHYS_MODE_TARGET) !=
		      NVC3B5_SET_DST_PHYS_MODE_TARGET_LOCAL_FB;

	return (struct side){ address, physical, sysmem };
}

/* At most up to the end of a page: what lies behind that may be anywhere. */
static u64 piece(u64 address, u64 bytes)
{
	return min_t(u64, bytes, PAGE_SIZE - (address & (PAGE_SIZE - 1)));
}

static void *place(const struct side *where, u64 bytes)
{
	void *found = where->physical ? gpu_physical(where->address, where->sysmem, bytes) :
					gpu_virtual(where->address, bytes);

	if (!found)
		trouble(SUBCHANNEL_COPY, where->physical, where->address);
	return found;
}

static bool put(struct side *to, const u8 *from, u64 bytes)
{
	void *memory;
	u64 now;

	for (; bytes; bytes -= now, from += now, to->address += now) {
		now = piece(to->address, bytes);
		memory = place(to, now);
		if (!memory)
			return false;
		memcpy(memory, from, now);
	}
	return true;
}

static u32 component(const u32 *copy, u32 index)
{
	u32 source = copy[NVC3B5_SET_REMAP_COMPONENTS / 4] >> (4 * index) & 7;

	return copy[(source == NVC3B5_SET_REMAP_COMPONENTS_DST_X_CONST_A ? NVC3B5_SET_REMAP_CONST_A :
									  NVC3B5_SET_REMAP_CONST_B) / 4];
}

/* Constants are written to each element; UVM never lets a source take part. */
static void fill(const u32 *copy, struct side *to)
{
	u32 remap = copy[NVC3B5_SET_REMAP_COMPONENTS / 4], count = copy[NVC3B5_LINE_LENGTH_IN / 4];
	u32 size = FIELD_OF(remap, NVC3B5_SET_REMAP_COMPONENTS_COMPONENT_SIZE) + 1;
	u32 parts = FIELD_OF(remap, NVC3B5_SET_REMAP_COMPONENTS_NUM_DST_COMPONENTS) + 1, part, value;
	u8 element[16];

	for (part = 0; part < parts; part++) {
		value = component(copy, part);
		memcpy(element + part * size, &value, size);
	}
	while (count && put(to, element, size * parts))
		count--;
}

static void move(struct side *to, struct side *from, u64 bytes)
{
	void *source;
	u64 now;

	for (; bytes; bytes -= now, from->address += now) {
		now = piece(from->address, bytes);
		source = place(from, now);
		if (!source || !put(to, source, now))
			return;
	}
}

static void transfer(const u32 *copy, u32 launch)
{
	struct side to = side(copy, pair(copy, NVC3B5_OFFSET_OUT_UPPER, NVC3B5_OFFSET_OUT_LOWER),
			      FIELD_OF(launch, NVC3B5_LAUNCH_DMA_DST_TYPE), NVC3B5_SET_DST_PHYS_MODE);
	struct side from = side(copy, pair(copy, NVC3B5_OFFSET_IN_UPPER, NVC3B5_OFFSET_IN_LOWER),
				FIELD_OF(launch, NVC3B5_LAUNCH_DMA_SRC_TYPE), NVC3B5_SET_SRC_PHYS_MODE);

	if (FIELD_OF(launch, NVC3B5_LAUNCH_DMA_REMAP_ENABLE))
		fill(copy, &to);
	else
		move(&to, &from, copy[NVC3B5_LINE_LENGTH_IN / 4]);
}

/* Modulo the payload plus one, as the hardware counts up. */
static void reduce(u64 address, u32 limit)
{
	u32 *memory = target(address, 4);

	if (memory)
		smp_store_release(memory, *memory >= limit ? 0 : *memory + 1);
}

static void launch_copy(const u32 *copy, u32 launch)
{
	u64 address = pair(copy, NVC3B5_SET_SEMAPHORE_A, NVC3B5_SET_SEMAPHORE_B);
	u32 payload = copy[NVC3B5_SET_SEMAPHORE_PAYLOAD / 4];

	if (FIELD_OF(launch, NVC3B5_LAUNCH_DMA_DATA_TRANSFER_TYPE) != NVC3B5_LAUNCH_DMA_DATA_TRANSFER_TYPE_NONE)
		transfer(copy, launch);
	switch (FIELD_OF(launch, NVC3B5_LAUNCH_DMA_SEMAPHORE_TYPE)) {
	case NVC3B5_LAUNCH_DMA_SEMAPHORE_TYPE_NONE:
		return;
	case NVC3B5_LAUNCH_DMA_SEMAPHORE_TYPE_RELEASE_ONE_WORD_SEMAPHORE:
		if (FIELD_OF(launch, NVC3B5_LAUNCH_DMA_SEMAPHORE_REDUCTION_ENABLE))
			reduce(address, payload);
		else
			release(address, payload, false);
		return;
	case NVC3B5_LAUNCH_DMA_SEMAPHORE_TYPE_RELEASE_FOUR_WORD_SEMAPHORE:
		release(address, payload, true);
		return;
	}
	trouble(SUBCHANNEL_COPY, NVC3B5_LAUNCH_DMA, launch);
}

static bool copy_method(struct gpu_channel *channel, u32 method, u32 data)
{
	if (method / 4 >= ARRAY_SIZE(channel->copy))
		return trouble(SUBCHANNEL_COPY, method, data);
	channel->copy[method / 4] = data;
	if (method == NVC3B5_LAUNCH_DMA)
		launch_copy(channel->copy, data);
	return true;
}

static bool software_method(struct gpu_channel *channel, u32 method, u32 data)
{
	u32 word = (method - HOST_METHODS) / 4, low;
	u64 instance;

	if (word >= ARRAY_SIZE(channel->sw))
		return trouble(SUBCHANNEL_SW, method, data);
	channel->sw[word] = data;
	if (method == NVC076_FAULT_CANCEL_C) {
		low = channel->sw[(NVC076_FAULT_CANCEL_A - HOST_METHODS) / 4];
		instance = (FIELD_OF(low, NVC076_FAULT_CANCEL_A_INST_LOW) << 12) |
			   (u64)channel->sw[(NVC076_FAULT_CANCEL_B - HOST_METHODS) / 4] << 32;
		gpu_did(GPU_CANCEL_INSTANCE, instance, 0, FIELD_OF(data, NVC076_FAULT_CANCEL_C_MODE), 0);
		gpu_accesses_cancel_group(instance);
	}
	return true;
}

static bool method(struct gpu_channel *channel, u32 data)
{
	if (channel->method < HOST_METHODS)
		return host_method(channel, channel->method, data);
	if (channel->subchannel == SUBCHANNEL_COPY)
		return copy_method(channel, channel->method, data);
	if (channel->subchannel == SUBCHANNEL_SW)
		return software_method(channel, channel->method, data);
	return trouble(channel->subchannel, channel->method, data);
}

static void header(struct gpu_channel *channel, u32 word)
{
	u32 kind = FIELD_OF(word, NVC46F_DMA_SEC_OP);

	channel->method = FIELD_OF(word, NVC46F_DMA_METHOD_ADDRESS) << 2;
	channel->subchannel = FIELD_OF(word, NVC46F_DMA_METHOD_SUBCHANNEL);
	channel->methods = FIELD_OF(word, NVC46F_DMA_METHOD_COUNT);
	channel->increments = kind == NVC46F_DMA_SEC_OP_INC_METHOD;
	if (kind != NVC46F_DMA_SEC_OP_INC_METHOD && kind != NVC46F_DMA_SEC_OP_NON_INC_METHOD) {
		trouble(channel->subchannel, channel->method, word);
		channel->methods = 0;
	}
}

/* False: the word has to be run again later. */
static bool word(struct gpu_channel *channel)
{
	u32 *memory = target(channel->at, 4);

	if (memory && !channel->methods) {
		header(channel, *memory);
	} else if (memory) {
		if (!method(channel, *memory))
			return false;
		channel->methods--;
		channel->method += channel->increments ? 4 : 0;
	}
	channel->at += 4;
	channel->left--;
	return true;
}

/* An entry of length 0 is a control entry, which says nothing that matters here. */
static void fetch(struct gpu_channel *channel)
{
	u64 entry = channel->entries[channel->get];
	u32 high = entry >> 32;

	channel->at = (entry & 0xfffffffcull) | FIELD_OF(high, NVC46F_GP_ENTRY1_GET_HI) << 32;
	channel->left = FIELD_OF(high, NVC46F_GP_ENTRY1_LENGTH);
	channel->methods = 0;
}

bool gpu_run(struct gpu_channel *channel)
{
	bool busy = false;

	while (channel->get != READ_ONCE(channel->words[GPU_PUT])) {
		/* The entry and the push buffer were written before GP_PUT. */
		smp_rmb();
		if (!channel->left)
			fetch(channel);
		while (channel->left) {
			if (!word(channel))
				return busy;
			busy = true;
		}
		channel->get = (channel->get + 1) % channel->count;
		WRITE_ONCE(channel->words[GPU_GET], channel->get);
	}
	return busy;
}
