// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Accesses of clients that stand still on a fault. The page tables decide, as on hardware: a replay
 * tries each again, and one that still finds nothing faults again; a cancel ends it. So a test sees
 * whether what UVM or the patch wrote lets the work go on.
 */
#include <linux/slab.h>

#include "gpu.h"

/* Hardware's numbers of accesses: 0 reads. */
#define ACCESS_READ 0
#define ACCESS_WRITE 1
#define ACCESS_PREFETCH 3
#define FIRST_GRAPHICS_ENGINE 64

struct access {
	struct list_head node;
	struct gpu_fault fault;
	u32 channel;
	bool unsent;
};

static LIST_HEAD(accesses);
static u32 standing;
static bool unsent;
static DEFINE_MUTEX(lock);

static u32 veid(const struct gpu_fault *fault)
{
	return fault->engine >= FIRST_GRAPHICS_ENGINE ? fault->engine - FIRST_GRAPHICS_ENGINE : 0;
}

static bool allowed(u64 pte, u32 access)
{
	if (access == ACCESS_READ || access == ACCESS_PREFETCH)
		return true;
	return !(pte & GPU_PTE_READ_ONLY) && (access == ACCESS_WRITE || !(pte & GPU_PTE_NO_ATOMICS));
}

/* Small pages or big ones, whichever has something. */
static bool succeeds(const struct access *one, struct gpu_walk *found, bool *sparse)
{
	const struct gpu_space *space = gpu_space_of(one->channel, veid(&one->fault), one->fault.hub);
	int big;

	for (big = 0; space && big < 2; big++) {
		if (gpu_walk(space, one->fault.address, big, found))
			continue;
		*sparse = !(found->pte & GPU_PTE_VALID) && found->pte & GPU_PTE_VOLATILE;
		/* Of a directory bit 0 is not "valid": one that points on has no pages below it here. */
		if (*sparse)
			return true;
		if (found->level < 3 && found->pte & GPU_PTE_VALID && allowed(found->pte, one->fault.access))
			return true;
	}
	return false;
}

static void end(struct access *one)
{
	list_del(&one->node);
	standing--;
	kfree(one);
}

u32 gpu_accesses_standing(void)
{
	return READ_ONCE(standing);
}

/* A fault, unless the page tables have something by now. What gpu_fault() says, 0 if there is no need of one. */
static int try(struct access *one)
{
	struct gpu_walk found;
	bool done, sparse;

	mutex_lock(&gpu_spaces_lock);
	done = !one->fault.stubborn && succeeds(one, &found, &sparse);
	mutex_unlock(&gpu_spaces_lock);
	if (!done)
		return gpu_fault(&one->fault);
	gpu_did(GPU_WENT_ON, one->fault.address, found.pte, found.level, sparse);
	end(one);
	return 0;
}

/* A full buffer takes no more for a while. One that has gone on is no more. */
static void again(struct access *one)
{
	int error;

	one->unsent = false;
	error = try(one);
	if (error == -ENOSPC)
		one->unsent = true;
	else if (error)
		gpu_did(GPU_TROUBLE, one->fault.address, 0, 0, 0);
	unsent |= error == -ENOSPC;
}

void gpu_accesses_unsent(void)
{
	struct access *one, *next;

	if (!READ_ONCE(unsent))
		return;
	mutex_lock(&lock);
	unsent = false;
	list_for_each_entry_safe(one, next, &accesses, node)
		if (one->unsent)
			again(one);
	mutex_unlock(&lock);
}

void gpu_accesses_replay(void)
{
	struct access *one, *next;

	mutex_lock(&lock);
	list_for_each_entry_safe(one, next, &accesses, node)
		if (one->fault.replayable)
			again(one);
	mutex_unlock(&lock);
}

void gpu_accesses_resume(u32 channel)
{
	struct access *one, *next;

	mutex_lock(&lock);
	list_for_each_entry_safe(one, next, &accesses, node)
		if (!one->fault.replayable && one->channel == channel)
			again(one);
	mutex_unlock(&lock);
}

static bool in_directory(const struct access *one, u64 directory)
{
	const struct gpu_space *space;
	bool same;

	mutex_lock(&gpu_spaces_lock);
	space = gpu_space_of(one->channel, veid(&one->fault), one->fault.hub);
	same = space && space->set && space->directory == directory;
	mutex_unlock(&gpu_spaces_lock);
	return same;
}

void gpu_accesses_cancel_address(u64 address, u64 directory, u32 engine)
{
	struct access *one, *next;

	mutex_lock(&lock);
	list_for_each_entry_safe(one, next, &accesses, node)
		if (one->fault.replayable && one->fault.engine == engine &&
		    one->fault.address >> 12 == address >> 12 && in_directory(one, directory))
			end(one);
	mutex_unlock(&lock);
}

/* Everything of the channel group that the instance block belongs to. */
void gpu_accesses_cancel_group(u64 instance)
{
	struct access *one, *next;
	bool same;

	mutex_lock(&lock);
	list_for_each_entry_safe(one, next, &accesses, node) {
		mutex_lock(&gpu_spaces_lock);
		same = gpu_same_group(one->fault.instance, instance);
		mutex_unlock(&gpu_spaces_lock);
		if (same)
			end(one);
	}
	mutex_unlock(&lock);
}

/* Nothing comes between the channel and what ran on it: an access that did would stand still for ever. */
void gpu_accesses_end(u32 channel, struct list_head *node)
{
	struct access *one, *next;

	mutex_lock(&lock);
	mutex_lock(&gpu_spaces_lock);
	list_del(node);
	mutex_unlock(&gpu_spaces_lock);
	list_for_each_entry_safe(one, next, &accesses, node)
		if (one->channel == channel)
			end(one);
	mutex_unlock(&lock);
}

void gpu_accesses_drop(u64 address)
{
	struct access *one, *next;

	mutex_lock(&lock);
	list_for_each_entry_safe(one, next, &accesses, node)
		if (!one->fault.replayable && one->fault.address >> 12 == address >> 12)
			end(one);
	mutex_unlock(&lock);
}

/* Nothing runs on a channel that is gone. */
int gpu_access(const struct gpu_fault *fault, u32 channel)
{
	struct access *one = kzalloc(sizeof(*one), GFP_KERNEL);
	bool known;
	int error;

	if (!one)
		return -ENOMEM;
	one->fault = *fault;
	one->channel = channel;
	mutex_lock(&lock);
	list_add_tail(&one->node, &accesses);
	standing++;
	mutex_lock(&gpu_spaces_lock);
	known = gpu_channel_known(channel);
	mutex_unlock(&gpu_spaces_lock);
	error = known ? try(one) : -ENXIO;
	if (error)
		end(one);
	mutex_unlock(&lock);
	return error;
}

void gpu_accesses_close(void)
{
	struct access *one, *next;

	list_for_each_entry_safe(one, next, &accesses, node)
		end(one);
}
