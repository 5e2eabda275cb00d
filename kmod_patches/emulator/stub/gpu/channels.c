// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Channels of UVM's own, and the thread that is the hardware behind them and behind the interrupt line. */
#include <linux/delay.h>
#include <linux/kthread.h>
#include <linux/slab.h>

#include "gpu.h"

static LIST_HEAD(channels);
static DEFINE_MUTEX(channels_lock);
static struct task_struct *thread;
static int group;

NV_STATUS nvUvmInterfaceTsgAllocate(uvmGpuAddressSpaceHandle space, const UvmGpuTsgAllocParams *parameters,
				    uvmGpuTsgHandle *handle)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceTsgAllocate);
	if (parameters->engineType != UVM_GPU_CHANNEL_ENGINE_TYPE_CE)
		return NV_ERR_NOT_SUPPORTED;
	*handle = (uvmGpuTsgHandle)&group;
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceTsgAllocate);

void nvUvmInterfaceTsgDestroy(uvmGpuTsgHandle handle)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceTsgDestroy);
}
MPSD_STUB_ANSWERS(nvUvmInterfaceTsgDestroy);

static struct gpu_channel *make(u32 count)
{
	struct gpu_channel *channel = kvzalloc(sizeof(*channel), GFP_KERNEL);

	if (!channel)
		return NULL;
	channel->count = count;
	channel->entries = gpu_allocate(count * sizeof(u64), 0, &channel->entries_va);
	channel->words = gpu_allocate(GPU_WORDS * sizeof(u32), 0, &channel->words_va);
	if (channel->entries && channel->words)
		return channel;
	if (channel->entries)
		gpu_release(channel->entries_va);
	kvfree(channel);
	return NULL;
}

static void describe(struct gpu_channel *channel, UvmGpuChannelInfo *info)
{
	volatile u32 *words = channel->words;

	memset(info, 0, sizeof(*info));
	info->gpGet = &words[GPU_GET];
	info->gpPut = &words[GPU_PUT];
	info->gpFifoEntries = channel->entries;
	info->numGpFifoEntries = channel->count;
	info->errorNotifier = &channel->notifier;
	info->workSubmissionOffset = &words[GPU_DOORBELL];
	info->pWorkSubmissionToken = &words[GPU_TOKEN];
	info->gpFifoGpuVa = channel->entries_va;
	info->gpGetGpuVa = channel->words_va + GPU_GET * sizeof(u32);
	info->gpPutGpuVa = channel->words_va + GPU_PUT * sizeof(u32);
}

NV_STATUS nvUvmInterfaceChannelAllocate(const uvmGpuTsgHandle tsg, const UvmGpuChannelAllocParams *parameters,
					uvmGpuChannelHandle *handle, UvmGpuChannelInfo *info)
{
	struct gpu_channel *channel = make(parameters->numGpFifoEntries);

	mpsd_stub_answered(CALL_nvUvmInterfaceChannelAllocate);
	if (!channel)
		return NV_ERR_NO_MEMORY;
	describe(channel, info);
	mutex_lock(&channels_lock);
	list_add_tail(&channel->node, &channels);
	mutex_unlock(&channels_lock);
	*handle = (uvmGpuChannelHandle)channel;
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceChannelAllocate);

void nvUvmInterfaceChannelDestroy(uvmGpuChannelHandle handle)
{
	struct gpu_channel *channel = (struct gpu_channel *)handle;

	mpsd_stub_answered(CALL_nvUvmInterfaceChannelDestroy);
	mutex_lock(&channels_lock);
	list_del(&channel->node);
	mutex_unlock(&channels_lock);
	gpu_release(channel->entries_va);
	gpu_release(channel->words_va);
	kvfree(channel);
}
MPSD_STUB_ANSWERS(nvUvmInterfaceChannelDestroy);

static bool run_all(void)
{
	struct gpu_channel *channel;
	bool busy = false;

	mutex_lock(&channels_lock);
	list_for_each_entry(channel, &channels, node)
		busy |= gpu_run(channel);
	mutex_unlock(&channels_lock);
	return busy;
}

static int hardware(void *unused)
{
	while (!kthread_should_stop()) {
		gpu_accesses_unsent();
		gpu_faults_interrupt();
		if (run_all())
			cond_resched();
		else
			usleep_range(50, 100);
	}
	return 0;
}

int gpu_channels_open(void)
{
	thread = kthread_run(hardware, NULL, "mpsd-gpu");
	return PTR_ERR_OR_ZERO(thread);
}

void gpu_channels_close(void)
{
	kthread_stop(thread);
	WARN_ON(!list_empty(&channels));
}
