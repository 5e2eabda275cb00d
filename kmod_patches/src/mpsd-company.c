// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Whom the stock answer to a fault would harm: what it ends is the channel group (TSG), so the address spaces
 * that have channels in one with the client. A client that is dead and whose files are held is one of them.
 */
#include "uvm_common.h"
#include "uvm_gpu.h"
#include "uvm_user_channel.h"
#include "uvm_va_space.h"
#include "mpsd-glue.h"

/*
 * The group's table of subcontexts comes and goes with its channels, under a lock inside which nothing is
 * taken. A channel that is being registered is in the list before it has the table.
 */
static bool shares_group(const uvm_user_channel_t *channel, uvm_gpu_va_space_t *gpu_va_space)
{
	uvm_parent_gpu_t *parent = gpu_va_space->gpu->parent;
	bool found = false;
	u32 veid;

	if (!channel->in_subctx)
		return false;
	uvm_spin_lock(&parent->instance_ptr_table_lock);
	for (veid = 0; channel->subctx_info && veid < channel->tsg.max_subctx_count && !found; veid++) {
		const uvm_va_space_t *other = channel->subctx_info->subctxs[veid].va_space;

		found = other && other != gpu_va_space->va_space;
	}
	uvm_spin_unlock(&parent->instance_ptr_table_lock);
	return found;
}

bool mpsd_has_company(uvm_gpu_va_space_t *gpu_va_space)
{
	uvm_user_channel_t *channel;

	list_for_each_entry(channel, &gpu_va_space->registered_channels, list_node) {
		if (shares_group(channel, gpu_va_space))
			return true;
	}
	return false;
}
