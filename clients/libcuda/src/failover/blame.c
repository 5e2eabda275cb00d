// SPDX-License-Identifier: MIT
/*
 * An exception of a kernel names nobody: the kernel's log says on which SM it was, and the server's channels are reset. But
 * an SM keeps where the warp was that had it until somebody clears that (autopsy.c keeps the programs' own copies from it),
 * as an address in the warp's own address space, and any program of the lost domain may read it. Each looks whether that
 * is code of its own: code lies where the process was given addresses, which are others in each process. Two that were
 * forked from one may have the same; then both say that it is theirs.
 *
 * After a trap or a breakpoint nothing is kept. But who made it has its error before the driver resets the channels, and
 * its copy does not look at the SMs at all, as those of all others do before they say what they have met.
 *
 * Both were seen on an H200 (faultinject/reports, "Whose code it was").
 */
#include "failover/blame.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/ioctl.h>

#include "clock.h"
#include "failover/autopsy.h"
#include "failover/carry.h"
#include "failover/copy.h"
#include "failover/descriptors.h"
#include "failover/graph.h"
#include "failover/made.h"
#include "failover/manager.h"
#include "physical.h"
#include "thread.h"
#include "uvm.h"
#include "window.h"

#define GO_ON_MS 10		/* before what the resource manager is asked for next keeps it busy */
#define WAIT_MS 20
#define MOST_DEVICES 16
#define GROUPS 256
#define RANGES 4096

/* A context's device, as the copy's own client of the resource manager names it. */
struct device {
	int fd;
	uint32_t root, name, debugger, channel;	/* its debugger; its first channel */
};

static struct copy {
	unsigned int devices, groups, ranges;
	bool too_many;			/* ranges: what is in none of these may be the program's all the same */
	uint32_t channel;		/* the first of all: that of the first context's kernels */
	struct device device[MOST_DEVICES];
	struct {
		uint32_t name, device;
	} group[GROUPS];
	/* All that it has mapped, but in the windows, where no code lies. */
	struct {
		uint64_t base, size;
	} range[RANGES];
} copies[MPSD_COPY_NUMBERS];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static pthread_mutex_t look_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t look_ended = PTHREAD_COND_INITIALIZER;
/* What a look needs of the copy that is about to be left. */
struct subject {
	unsigned int number, serial;
	uint64_t moves;
	const struct mpsd_tables *tables;
	CUcontext context;		/* NULL: it is not asked how it is */
};

static struct {
	unsigned int serial;
	bool is_on;
	enum mpsd_failover_whose whose;
} look;

static atomic_bool may_tell;
static atomic_int sm_count;		/* of a GPU */

/* What the copy has */

static struct device *device_of(struct copy *copy, uint32_t root, uint32_t name)
{
	for (unsigned int i = 0; i < copy->devices; i++)
		if (copy->device[i].root == root && copy->device[i].name == name)
			return &copy->device[i];
	if (copy->devices == MOST_DEVICES)
		return NULL;
	copy->device[copy->devices] = (struct device){ -1, root, name, 0, 0 };
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
		struct device *device;

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
	struct device *device;

	if (allocation->class == MPSD_RM_CHANNEL_GROUP) {
		note_group(copy, allocation->object, allocation->parent);
	} else if ((allocation->class & 0xff) == MPSD_RM_CHANNEL && allocation->class > 0xffff / 2) {
		note_channel(copy, allocation);
	} else if (allocation->class == MPSD_RM_DEBUGGER) {
		device = device_of(copy, allocation->root, allocation->parent);
		if (device) {
			device->fd = fd;
			device->debugger = allocation->object;
		}
	}
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

void mpsd_blame_note(unsigned int number, int fd, unsigned long request, const void *argument)
{
	const struct mpsd_rm_duplicate *duplicate = argument;
	const uint64_t *range = argument;
	bool is_object = (request & 0xffff) == MPSD_RM_ALLOC && mpsd_rm_allocated(request, argument);
	bool is_double = request == MPSD_RM_DUPLICATE && !duplicate->status;

	if (!is_object && !is_double && (request != MPSD_UVM_MAP_EXTERNAL || mpsd_window_covers(range[0], range[1])))
		return;
	pthread_mutex_lock(&lock);
	if (is_object)
		note_object(&copies[number], fd, argument);
	else if (is_double)
		note_group(&copies[number], duplicate->object, duplicate->parent);
	else
		note_range(&copies[number], range[0], range[1]);
	pthread_mutex_unlock(&lock);
}

void mpsd_blame_forget(unsigned int number)
{
	pthread_mutex_lock(&lock);
	/* What follows the counts is not looked at. */
	copies[number].devices = copies[number].groups = copies[number].ranges = 0;
	copies[number].too_many = false;
	copies[number].channel = 0;
	pthread_mutex_unlock(&lock);
}

/* The look */

static bool is_own(struct copy *copy, uint64_t pc)
{
	for (unsigned int i = 0; i < copy->ranges; i++)
		if (pc - copy->range[i].base < copy->range[i].size)
			return true;
	return false;
}

/* Of so many SMs; `whose` stays what it is where none of them had anything. */
static bool read_some(unsigned int number, const struct device *device, uint32_t first, uint32_t count,
		      enum mpsd_failover_whose *whose)
{
	struct mpsd_rm_sm_states states = { .channel = device->channel, .count = count, .first = first };
	struct mpsd_rm_control control = {
		.client = device->root,
		.object = device->debugger,
		.command = MPSD_RM_READ_ALL_SM_ERROR_STATES,
		.parameters = (uint64_t)&states,
		.size = sizeof(states),
	};

	if (mpsd_autopsy_ask(number, device->fd, MPSD_RM_CONTROL, &control) || control.status)
		return false;
	pthread_mutex_lock(&lock);
	for (uint32_t i = 0; i < count && *whose != MPSD_FAILOVER_WHOSE_OWN; i++) {
		if (!states.states[i].pc)
			continue;
		if (is_own(&copies[number], states.states[i].pc))
			*whose = MPSD_FAILOVER_WHOSE_OWN;
		else if (!copies[number].too_many)
			*whose = MPSD_FAILOVER_WHOSE_OTHERS;
	}
	pthread_mutex_unlock(&lock);
	return true;
}

/* The copy's devices that can be asked. */
static unsigned int find_devices(struct copy *copy, struct device devices[MOST_DEVICES])
{
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

/* The copy is not unloaded meanwhile. */
static void enter(uint64_t moves)
{
	if (moves)
		atomic_fetch_add(mpsd_inside_of(moves), 1);
}

static void leave(uint64_t moves)
{
	if (moves)
		atomic_fetch_sub(mpsd_inside_of(moves), 1);
}

static enum mpsd_failover_whose look_at(unsigned int number)
{
	enum mpsd_failover_whose whose = MPSD_FAILOVER_WHOSE_UNKNOWN;
	struct device devices[MOST_DEVICES];
	uint32_t count = (uint32_t)atomic_load(&sm_count);
	unsigned int known = find_devices(&copies[number], devices);

	for (unsigned int i = 0; i < known; i++) {
		if (!devices[i].channel || !mpsd_descriptors_is(number, devices[i].fd))
			continue;
		for (uint32_t at = 0; at < count; at += MPSD_RM_MOST_SMS) {
			uint32_t left = count - at;

			if (!read_some(number, &devices[i], at, left < MPSD_RM_MOST_SMS ? left : MPSD_RM_MOST_SMS, &whose))
				return MPSD_FAILOVER_WHOSE_UNKNOWN;
		}
	}
	return whose;
}

/*
 * Whether its context is lost, and the copy knows that without having looked at the SMs: it has no reason to look any
 * more that it had not before. Beside the mover, for who is in the driver may keep its locks.
 */
static bool is_first(const struct subject *of)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	CUresult result;

	if (!of->context || mpsd_autopsy_has_looked(of->number))
		return false;
	mpsd_thread.tables = of->tables;
	real_cuThreadExchangeStreamCaptureMode(&mode);
	result = real_cuCtxSetCurrent(of->context);
	if (result == CUDA_SUCCESS)
		result = real_cuStreamQuery(CU_STREAM_LEGACY);
	real_cuCtxSetCurrent(NULL);
	mpsd_thread.tables = NULL;
	return mpsd_is_loss(result) && !mpsd_autopsy_has_looked(of->number);
}

static void *run(void *argument)
{
	struct subject *of = argument;
	enum mpsd_failover_whose whose = look_at(of->number);

	if (!whose && is_first(of))
		whose = MPSD_FAILOVER_WHOSE_FIRST;
	leave(of->moves);
	pthread_mutex_lock(&look_lock);
	if (look.serial == of->serial) {
		look.whose = whose;
		look.is_on = false;
		pthread_cond_signal(&look_ended);
	}
	pthread_mutex_unlock(&look_lock);
	free(of);
	return NULL;
}

void mpsd_blame_prepare(void)
{
	int count = 0;

	if (real_cuDeviceGetAttribute(&count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0) == CUDA_SUCCESS && count > 0)
		atomic_store(&sm_count, count);
}

/* A context of the program's in the copy in use. NULL where what is asked of one would disturb a capture. */
static CUcontext find_context(void)
{
	struct mpsd_made *context = NULL;

	if (mpsd_capturing())
		return NULL;
	mpsd_made_lock();
	for (int device = 0; !context && device < MPSD_DEVICES; device++)
		context = mpsd_made_context(device);
	mpsd_made_unlock();
	return context ? context->native : NULL;
}

void mpsd_blame_begin(unsigned int number)
{
	struct device devices[MOST_DEVICES];
	struct subject *of = find_devices(&copies[number], devices) ? malloc(sizeof(*of)) : NULL;

	if (!of)
		return;
	pthread_mutex_lock(&look_lock);
	*of = (struct subject){ number, ++look.serial, mpsd_moves_done(), mpsd_tables(), NULL };
	look.whose = MPSD_FAILOVER_WHOSE_UNKNOWN;
	look.is_on = true;
	pthread_mutex_unlock(&look_lock);
	of->context = find_context();
	enter(of->moves);
	if (mpsd_thread_start(run, of))
		return;
	leave(of->moves);
	free(of);
	look.is_on = false;
}

/* With its lock. */
static void await_look(int milliseconds)
{
	struct timespec until = mpsd_in(milliseconds);

	while (look.is_on && !pthread_cond_timedwait(&look_ended, &look_lock, &until))
		;
}

void mpsd_blame_wait(void)
{
	pthread_mutex_lock(&look_lock);
	await_look(GO_ON_MS);
	pthread_mutex_unlock(&look_lock);
}

enum mpsd_failover_whose mpsd_blame_end(void)
{
	enum mpsd_failover_whose whose;

	pthread_mutex_lock(&look_lock);
	await_look(WAIT_MS);
	whose = look.whose;
	look.whose = MPSD_FAILOVER_WHOSE_UNKNOWN;
	look.is_on = false;
	look.serial++;
	pthread_mutex_unlock(&look_lock);
	return whose;
}

void mpsd_blame_may_tell(bool may)
{
	atomic_store(&may_tell, may);
}

bool mpsd_blame_is_told(void)
{
	return atomic_load(&may_tell);
}
