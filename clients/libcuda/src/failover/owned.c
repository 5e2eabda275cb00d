// SPDX-License-Identifier: MIT
/*
 * What each copy of the driver has with the resource manager that an exception can be looked up by: of each context its
 * debugger and its first channel, which say of whose context that is asked, and all that was mapped for a GPU.
 */
#include "failover/owned.h"

#include <pthread.h>

#include "failover/copy.h"
#include "failover/manager.h"
#include "uvm.h"
#include "window.h"

#define GROUPS 256
#define RANGES 4096

static struct copy {
	unsigned int devices, groups, ranges;
	bool too_many;			/* ranges: what is in none of these may be the program's all the same */
	uint32_t channel, first_device;	/* the first of all: that of the first context's kernels; where a debugger is */
	struct mpsd_owned device[MPSD_OWNED_MOST];
	struct {
		uint32_t name, device;
	} group[GROUPS];
	/* All that it has mapped, but in the windows, where no code lies. */
	struct {
		uint64_t base, size;
	} range[RANGES];
} copies[MPSD_COPY_NUMBERS];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct mpsd_owned *device_of(struct copy *copy, uint32_t root, uint32_t name)
{
	for (unsigned int i = 0; i < copy->devices; i++)
		if (copy->device[i].root == root && copy->device[i].name == name)
			return &copy->device[i];
	if (copy->devices == MPSD_OWNED_MOST)
		return NULL;
	copy->device[copy->devices] = (struct mpsd_owned){ -1, root, name, 0, 0 };
	return &copy->device[copy->devices++];
}

/* Under MPS the group of channels for kernels is the server's, of which the program has a duplicate. */
static void note_group(struct copy *copy, uint32_t name, uint32_t device)
{
	if (copy->groups == GROUPS)
		return;
	copy->group[copy->groups].name = name;
	copy->group[copy->groups++].device = device;
}

static void note_channel(struct copy *copy, const struct mpsd_rm_allocation *allocation)
{
	if (!copy->channel)
		copy->channel = allocation->object;
	for (unsigned int i = 0; i < copy->groups; i++) {
		struct mpsd_owned *device;

		if (copy->group[i].name != allocation->parent)
			continue;
		device = device_of(copy, allocation->root, copy->group[i].device);
		if (device && !device->channel)
			device->channel = allocation->object;
		return;
	}
}

static void note_object(struct copy *copy, int fd, const struct mpsd_rm_allocation *allocation)
{
	struct mpsd_owned *device;

	if (allocation->class == MPSD_RM_CHANNEL_GROUP) {
		note_group(copy, allocation->object, allocation->parent);
	} else if ((allocation->class & 0xff) == MPSD_RM_CHANNEL && allocation->class > 0xffff / 2) {
		note_channel(copy, allocation);
	} else if (allocation->class == MPSD_RM_DEBUGGER) {
		device = device_of(copy, allocation->root, allocation->parent);
		if (device) {
			device->fd = fd;
			device->debugger = allocation->object;
			copy->first_device = copy->first_device ? copy->first_device : device->name;
		}
	}
}

/* A context that is made anew has others. What a device had goes with it. */
static void forget_object(struct copy *copy, const struct mpsd_rm_release *of)
{
	for (unsigned int i = 0; i < copy->devices; i++) {
		struct mpsd_owned *device = &copy->device[i];

		if (device->root != of->root)
			continue;
		if (of->object == device->debugger || of->object == device->name)
			device->debugger = 0;
		if (of->object == device->channel || of->object == device->name)
			device->channel = 0;
	}
	if (of->object == copy->channel || of->object == copy->first_device)
		copy->channel = 0;
}

static void note_range(struct copy *copy, uint64_t base, uint64_t size)
{
	for (unsigned int i = 0; i < copy->ranges; i++)
		if (copy->range[i].base == base && copy->range[i].size == size)
			return;
	copy->too_many = copy->too_many || copy->ranges == RANGES;
	if (copy->too_many)
		return;
	copy->range[copy->ranges].base = base;
	copy->range[copy->ranges++].size = size;
}

void mpsd_owned_note(unsigned int number, int fd, unsigned long request, const void *argument)
{
	const struct mpsd_rm_duplicate *duplicate = argument;
	const struct mpsd_rm_release *release = argument;
	const uint64_t *range = argument;
	bool is_object = (request & 0xffff) == MPSD_RM_ALLOC && mpsd_rm_allocated(request, argument);
	bool is_double = request == MPSD_RM_DUPLICATE && !duplicate->status;
	bool is_end = request == MPSD_RM_FREE && !release->status;

	if (!is_object && !is_double && !is_end && (request != MPSD_UVM_MAP_EXTERNAL || mpsd_window_covers(range[0], range[1])))
		return;
	pthread_mutex_lock(&lock);
	if (is_object)
		note_object(&copies[number], fd, argument);
	else if (is_end)
		forget_object(&copies[number], release);
	else if (is_double)
		note_group(&copies[number], duplicate->object, duplicate->parent);
	else
		note_range(&copies[number], range[0], range[1]);
	pthread_mutex_unlock(&lock);
}

void mpsd_owned_forget(unsigned int number)
{
	pthread_mutex_lock(&lock);
	/* What follows the counts is not looked at. */
	copies[number].devices = copies[number].groups = copies[number].ranges = 0;
	copies[number].too_many = false;
	copies[number].channel = copies[number].first_device = 0;
	pthread_mutex_unlock(&lock);
}

unsigned int mpsd_owned_devices(unsigned int number, struct mpsd_owned devices[MPSD_OWNED_MOST])
{
	struct copy *copy = &copies[number];
	unsigned int count = 0;

	pthread_mutex_lock(&lock);
	for (unsigned int i = 0; i < copy->devices; i++)
		if (copy->device[i].debugger)
			devices[count++] = copy->device[i];
	if (count == 1)
		devices[0].channel = copy->channel;
	pthread_mutex_unlock(&lock);
	return count;
}

enum mpsd_failover_whose mpsd_owned_whose(unsigned int number, uint64_t pc)
{
	enum mpsd_failover_whose whose;

	pthread_mutex_lock(&lock);
	whose = copies[number].too_many ? MPSD_FAILOVER_WHOSE_UNKNOWN : MPSD_FAILOVER_WHOSE_OTHERS;
	for (unsigned int i = 0; i < copies[number].ranges; i++)
		if (pc - copies[number].range[i].base < copies[number].range[i].size)
			whose = MPSD_FAILOVER_WHOSE_OWN;
	pthread_mutex_unlock(&lock);
	return whose;
}

/* Where what it has mapped from here on ends. */
static uint64_t mapped_to(const struct copy *copy, uint64_t start, uint64_t end)
{
	for (unsigned int i = 0; i < copy->ranges && start < end; i++) {
		if (start - copy->range[i].base >= copy->range[i].size)
			continue;
		start = copy->range[i].base + copy->range[i].size;
		/* Another one, maybe an earlier one, begins there. */
		i = (unsigned int)-1;
	}
	return start;
}

static bool has_none_of(const struct copy *copy, uint64_t start, uint64_t end)
{
	for (unsigned int i = 0; i < copy->ranges; i++)
		if (copy->range[i].base < end && start < copy->range[i].base + copy->range[i].size)
			return false;
	return !copy->too_many;
}

bool mpsd_owned_alone(unsigned int number, uint64_t start, uint64_t end)
{
	bool is;

	pthread_mutex_lock(&lock);
	is = mapped_to(&copies[number], start, end) >= end;
	for (unsigned int i = 0; is && i < MPSD_COPY_NUMBERS; i++)
		is = i == number || has_none_of(&copies[i], start, end);
	pthread_mutex_unlock(&lock);
	return is;
}

void mpsd_owned_child(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
