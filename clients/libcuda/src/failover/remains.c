// SPDX-License-Identifier: MIT
/*
 * The program holds handles of its first copy of the driver, and the CUDA runtime goes on asking that for what it keeps
 * beside a context: it cannot be unloaded, nor may its context be reset. But what it has on the GPU is of no use any more,
 * half a GiB of memory and channels, each of which holds everybody up at the next exception of a kernel
 * (faultinject/evidence/mechanisms-failover.md). So the resource manager is asked to free its device, and all that was
 * made in it with it. First UVM lets go of the channels: their numbers are given out again then. Memory that others have
 * too, the vault or the next copy, stays, and so do pages of the host that are mapped. The copy is not told: what it asks
 * for afterwards fails, as all does in a context that is lost. (Seen on an H200: three programs of PyTorch and
 * cuda-bindings went through 80 faults with it.)
 *
 * UVM's numbers are those of uvm_ioctl.h.
 */
#include "failover/remains.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>

#include "debug.h"
#include "elfview.h"
#include "failover/descriptors.h"
#include "failover/manager.h"
#include "failover/ownpages.h"
#include "proxy.h"
#include "thread.h"
#include "uvm.h"

#define MOST 16

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* What that copy has. */
static struct remains {
	unsigned int device_count, space_count;
	struct {
		int fd;
		struct mpsd_rm_release of;
	} devices[MOST];
	struct {
		int fd;
		uint8_t gpu[16];
	} spaces[MOST];
} has;

static CUresult (*imitated)(void);

void mpsd_remains_know(void *library)
{
	imitated = (__typeof__(imitated))mpsd_elfview_symbol(library, "standinGiveBack");
}

static void note_device(int fd, unsigned long request, const struct mpsd_rm_allocation *allocation)
{
	if (allocation->class != MPSD_RM_DEVICE || has.device_count == MOST || !mpsd_rm_allocated(request, allocation))
		return;
	has.devices[has.device_count].fd = fd;
	has.devices[has.device_count++].of =
		(struct mpsd_rm_release){ allocation->root, allocation->parent, allocation->object, 0 };
}

static void forget_device(const struct mpsd_rm_release *of)
{
	for (unsigned int i = 0; i < has.device_count; i++)
		if (has.devices[i].of.root == of->root && has.devices[i].of.object == of->object)
			has.devices[i--] = has.devices[--has.device_count];
}

static void note_space(int fd, const uint8_t *gpu, bool is)
{
	for (unsigned int i = 0; i < has.space_count; i++)
		if (has.spaces[i].fd == fd && !memcmp(has.spaces[i].gpu, gpu, sizeof(has.spaces[i].gpu)))
			has.spaces[i--] = has.spaces[--has.space_count];
	if (!is || has.space_count == MOST)
		return;
	has.spaces[has.space_count].fd = fd;
	memcpy(has.spaces[has.space_count++].gpu, gpu, sizeof(has.spaces[0].gpu));
}

static bool is_of_interest(unsigned long request)
{
	return (request & 0xffff) == MPSD_RM_ALLOC || request == MPSD_RM_FREE || request == MPSD_UVM_REGISTER_SPACE ||
	       request == MPSD_UVM_UNREGISTER_SPACE;
}

void mpsd_remains_note(int fd, unsigned long request, const void *argument)
{
	if (!is_of_interest(request))
		return;
	pthread_mutex_lock(&lock);
	if ((request & 0xffff) == MPSD_RM_ALLOC)
		note_device(fd, request, argument);
	else if (request != MPSD_RM_FREE)
		note_space(fd, argument, request == MPSD_UVM_REGISTER_SPACE);
	else if (!((const struct mpsd_rm_release *)argument)->status)
		forget_device(argument);
	pthread_mutex_unlock(&lock);
}

/* The first copy is number 0. What it asks meanwhile does not wait for this. */
static void *give_back(void *unused)
{
	struct remains all;

	mpsd_pages_keep(0);
	pthread_mutex_lock(&lock);
	all = has;
	has = (struct remains){ 0 };
	pthread_mutex_unlock(&lock);
	for (; all.space_count; all.space_count--) {
		int fd = all.spaces[all.space_count - 1].fd;

		if (mpsd_descriptors_is(0, fd))
			mpsd_uvm_unregister_space(fd, all.spaces[all.space_count - 1].gpu);
	}
	for (; all.device_count; all.device_count--) {
		int fd = all.devices[all.device_count - 1].fd;

		if (mpsd_descriptors_is(0, fd))
			ioctl(fd, MPSD_RM_FREE, &all.devices[all.device_count - 1].of);
	}
	if (imitated)
		imitated();
	return unused;
}

bool mpsd_remains_end(void)
{
	return !mpsd_debug_number(MPSD_DEBUG_RELEASE, 1, 1, 0, 1) || mpsd_thread_start(give_back, NULL);
}

void mpsd_remains_child(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
