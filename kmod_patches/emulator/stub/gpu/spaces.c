// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Address spaces and clients' channels. A client's handles are invented by the test: the stub knows
 * any, and a channel's handle says what the channel is (see RetainChannel).
 */
#include <linux/slab.h>

#include "gpu.h"

/*
 * Parts of a channel's handle: number 7:0, group 15:8, VEID 21:16, copy engine instead of graphics 24, has a
 * context buffer 25, is in no subcontext 26, like all of copy engines.
 */
#define HANDLE_CHANNEL 7 : 0
#define HANDLE_GROUP 15 : 8
#define HANDLE_VEID 21 : 16
#define HANDLE_COPY 24 : 24
#define HANDLE_RESOURCE 25 : 25
#define HANDLE_PLAIN 26 : 26

struct client_channel {
	struct list_head node;
	const struct gpu_space *space;
	u32 number, group, veid;
	bool in_subcontext;
};

LIST_HEAD(gpu_spaces);
static LIST_HEAD(client_channels);
DEFINE_MUTEX(gpu_spaces_lock);
static u32 times[2];

static NV_STATUS add(u32 client, u32 object, uvmGpuAddressSpaceHandle *handle,
		     UvmGpuAddressSpaceInfo *info)
{
	struct gpu_space *space = kzalloc(sizeof(*space), GFP_KERNEL);

	if (!space)
		return NV_ERR_NO_MEMORY;
	space->client = client;
	space->object = object;
	mutex_lock(&gpu_spaces_lock);
	list_add_tail(&space->node, &gpu_spaces);
	mutex_unlock(&gpu_spaces_lock);
	memset(info, 0, sizeof(*info));
	info->bigPageSize = GPU_BIG_PAGE;
	info->time0Offset = &times[0];
	info->time1Offset = &times[1];
	info->maxSubctxCount = GPU_SUBCONTEXTS;
	*handle = (uvmGpuAddressSpaceHandle)space;
	return NV_OK;
}

#ifdef MPSD_RM_ATS
#define ATS_PARAMETER NvBool ats,
#else
#define ATS_PARAMETER
#endif

NV_STATUS nvUvmInterfaceAddressSpaceCreate(uvmGpuDeviceHandle device, unsigned long long base,
					   unsigned long long size, ATS_PARAMETER
					   uvmGpuAddressSpaceHandle *space, UvmGpuAddressSpaceInfo *info)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceAddressSpaceCreate);
	return add(0, 0, space, info);
}
MPSD_STUB_ANSWERS(nvUvmInterfaceAddressSpaceCreate);

NV_STATUS nvUvmInterfaceDupAddressSpace(uvmGpuDeviceHandle device, NvHandle client, NvHandle object,
					uvmGpuAddressSpaceHandle *space, UvmGpuAddressSpaceInfo *info)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceDupAddressSpace);
	return add(client, object, space, info);
}
MPSD_STUB_ANSWERS(nvUvmInterfaceDupAddressSpace);

void nvUvmInterfaceAddressSpaceDestroy(uvmGpuAddressSpaceHandle handle)
{
	struct gpu_space *space = (struct gpu_space *)handle;

	mpsd_stub_answered(CALL_nvUvmInterfaceAddressSpaceDestroy);
	mutex_lock(&gpu_spaces_lock);
	list_del(&space->node);
	mutex_unlock(&gpu_spaces_lock);
	kfree(space);
}
MPSD_STUB_ANSWERS(nvUvmInterfaceAddressSpaceDestroy);

static void set(uvmGpuAddressSpaceHandle handle, u64 directory, bool sysmem, bool present)
{
	struct gpu_space *space = (struct gpu_space *)handle;

	mutex_lock(&gpu_spaces_lock);
	space->directory = directory;
	space->sysmem = sysmem;
	space->set = present;
	mutex_unlock(&gpu_spaces_lock);
}

NV_STATUS nvUvmInterfaceSetPageDirectory(uvmGpuAddressSpaceHandle space, NvU64 directory,
					 unsigned int entries, NvBool vidmem, NvU32 pasid)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceSetPageDirectory);
	set(space, directory, !vidmem, true);
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceSetPageDirectory);

NV_STATUS nvUvmInterfaceUnsetPageDirectory(uvmGpuAddressSpaceHandle space)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceUnsetPageDirectory);
	set(space, 0, false, false);
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceUnsetPageDirectory);

static struct client_channel *channel_by_number(u32 number)
{
	struct client_channel *channel;

	list_for_each_entry(channel, &client_channels, node)
		if (channel->number == number)
			return channel;
	return NULL;
}

bool gpu_channel_known(u32 number)
{
	return channel_by_number(number);
}

/* An SM's packet may name any channel of the group: only the VEID tells whose access it is. */
const struct gpu_space *gpu_space_of(u32 number, u32 veid, bool hub)
{
	const struct client_channel *named = channel_by_number(number), *channel;

	if (!named)
		return NULL;
	if (hub || !named->in_subcontext)
		return named->space->set ? named->space : NULL;
	list_for_each_entry(channel, &client_channels, node)
		if (channel->group == named->group && channel->in_subcontext && channel->veid == veid)
			return channel->space->set ? channel->space : NULL;
	return NULL;
}

static struct client_channel *channel_by_instance(u64 instance)
{
	struct client_channel *channel;

	list_for_each_entry(channel, &client_channels, node)
		if (GPU_INSTANCE(channel->number) == instance)
			return channel;
	return NULL;
}

bool gpu_same_group(u64 instance, u64 other)
{
	const struct client_channel *one = channel_by_instance(instance), *two = channel_by_instance(other);

	return one && two && one->group == two->group;
}

const struct gpu_space *gpu_space_internal(void)
{
	const struct gpu_space *space;

	list_for_each_entry(space, &gpu_spaces, node)
		if (!space->client && space->set)
			return space;
	return NULL;
}

static struct client_channel *decode(u32 handle, uvmGpuAddressSpaceHandle space)
{
	struct client_channel *channel = kzalloc(sizeof(*channel), GFP_KERNEL);

	if (!channel)
		return NULL;
	channel->space = (const struct gpu_space *)space;
	channel->number = FIELD_OF(handle, HANDLE_CHANNEL);
	channel->group = FIELD_OF(handle, HANDLE_GROUP);
	channel->in_subcontext = !FIELD_OF(handle, HANDLE_COPY) && !FIELD_OF(handle, HANDLE_PLAIN);
	channel->veid = channel->in_subcontext ? FIELD_OF(handle, HANDLE_VEID) : 0;
	return channel;
}

NV_STATUS nvUvmInterfaceRetainChannel(uvmGpuAddressSpaceHandle space, NvHandle client, NvHandle handle,
				      void **retained, UvmGpuChannelInstanceInfo *info)
{
	struct client_channel *channel = decode(handle, space);

	mpsd_stub_answered(CALL_nvUvmInterfaceRetainChannel);
	if (!channel)
		return NV_ERR_NO_MEMORY;
	memset(info, 0, sizeof(*info));
	info->base = GPU_INSTANCE(channel->number);
	info->chId = channel->number;
	info->clearFaultedToken = channel->number;
	info->bInSubctx = channel->in_subcontext;
	info->subctxId = channel->veid;
	info->bTsgChannel = NV_TRUE;
	info->tsgId = channel->group;
	info->tsgMaxSubctxCount = GPU_SUBCONTEXTS;
	info->channelEngineType = FIELD_OF(handle, HANDLE_COPY) ? UVM_GPU_CHANNEL_ENGINE_TYPE_CE :
								  UVM_GPU_CHANNEL_ENGINE_TYPE_GR;
	if (FIELD_OF(handle, HANDLE_RESOURCE))
		gpu_channel_resource(channel, info);
	mutex_lock(&gpu_spaces_lock);
	list_add_tail(&channel->node, &client_channels);
	mutex_unlock(&gpu_spaces_lock);
	*retained = channel;
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceRetainChannel);

NV_STATUS nvUvmInterfaceBindChannelResources(void *retained, UvmGpuChannelResourceBindParams *parameters)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceBindChannelResources);
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceBindChannelResources);

void nvUvmInterfaceReleaseChannel(void *retained)
{
	struct client_channel *channel = retained;

	mpsd_stub_answered(CALL_nvUvmInterfaceReleaseChannel);
	gpu_accesses_end(channel->number, &channel->node);
	kfree(channel);
}
MPSD_STUB_ANSWERS(nvUvmInterfaceReleaseChannel);

/* It goes on faulting until it is released, which hardware's does not: UVM and the patch have to stand that. */
void nvUvmInterfaceStopChannel(void *retained, NvBool immediate)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceStopChannel);
	gpu_did(GPU_STOPPED, ((struct client_channel *)retained)->number, 0, immediate, 0);
}
MPSD_STUB_ANSWERS(nvUvmInterfaceStopChannel);
