// SPDX-License-Identifier: MIT
/*
 * The program holds handles of its first copy of the driver, and the CUDA runtime goes on asking that for what it keeps
 * beside a context: it cannot be unloaded, nor may its context be reset. But what it has on the GPU is of no use any more,
 * half a GiB of memory and channels, each of which holds everybody up at the next exception of a kernel (-stall). So the
 * resource manager is asked to free its device, and all that was made in it with it. First UVM lets go of the channels:
 * their numbers are given out again then. Memory that others have too, the vault or the next copy, stays, and so do
 * pages of the host that are mapped. The copy is not told: what it asks for afterwards fails, as all does in a context that
 * is lost. (Of 6 processes each that did so on an H200 by hand, none was lost, and their pinned memory was as before.)
 *
 * NVOS00, NVOS21, NVOS64 and the numbers are those of the open kernel modules (535 to 580), UVM's those of uvm_ioctl.h.
 */
#include "failover/remains.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>

#include "failover/descriptors.h"
#include "limits.h"
#include "thread.h"
#include "uvm.h"

#define RM_ALLOC 0x462bu		/* the ioctl's type and number; its size says which layout */
#define RM_FREE 0xc0104629ul
#define WITH_RIGHTS 0x30u
#define DEVICE_CLASS 0x80u
#define MOST 16

struct allocation {
	uint32_t root, parent, object, class;
	uint64_t parameters;
	union {
		struct {
			uint32_t size, status;
		} usual;
		struct {
			uint64_t rights;
			uint32_t size, flags, status, padding;
		} with_rights;
	};
};

struct release {
	uint32_t root, parent, object, status;
};

_Static_assert(sizeof(struct allocation) == WITH_RIGHTS && sizeof(struct release) == (RM_FREE >> 16 & 0x3fff),
	       "as the numbers of the ioctls say");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned int device_count, space_count;
static struct {
	int fd;
	struct release of;
} devices[MOST];
static struct {
	int fd;
	uint8_t gpu[16];
} spaces[MOST];

static CUresult (*imitated)(void);

void mpsd_remains_know(void *library)
{
	imitated = (__typeof__(imitated))dlsym(library, "standinGiveBack");
}

static void note_device(int fd, unsigned long request, const struct allocation *allocation)
{
	bool rights = (request >> 16 & 0x3fff) == WITH_RIGHTS;

	if (allocation->class != DEVICE_CLASS || device_count == MOST ||
	    (rights ? allocation->with_rights.status : allocation->usual.status))
		return;
	devices[device_count].fd = fd;
	devices[device_count++].of = (struct release){ allocation->root, allocation->parent, allocation->object, 0 };
}

static void forget_device(const struct release *of)
{
	for (unsigned int i = 0; i < device_count; i++)
		if (devices[i].of.root == of->root && devices[i].of.object == of->object)
			devices[i--] = devices[--device_count];
}

static void note_space(int fd, const uint8_t *gpu, bool is)
{
	for (unsigned int i = 0; i < space_count; i++)
		if (spaces[i].fd == fd && !memcmp(spaces[i].gpu, gpu, sizeof(spaces[i].gpu)))
			spaces[i--] = spaces[--space_count];
	if (!is || space_count == MOST)
		return;
	spaces[space_count].fd = fd;
	memcpy(spaces[space_count++].gpu, gpu, sizeof(spaces[0].gpu));
}

void mpsd_remains_note(int fd, unsigned long request, const void *argument)
{
	pthread_mutex_lock(&lock);
	if ((request & 0xffff) == RM_ALLOC)
		note_device(fd, request, argument);
	else if (request == RM_FREE && !((const struct release *)argument)->status)
		forget_device(argument);
	else if (request == MPSD_UVM_REGISTER_SPACE || request == MPSD_UVM_UNREGISTER_SPACE)
		note_space(fd, argument, request == MPSD_UVM_REGISTER_SPACE);
	pthread_mutex_unlock(&lock);
}

/* The first copy is number 0. */
static void *give_back(void *unused)
{
	pthread_mutex_lock(&lock);
	for (; space_count; space_count--) {
		int fd = spaces[space_count - 1].fd;

		if (mpsd_descriptors_is(0, fd))
			mpsd_uvm_unregister_space(fd, spaces[space_count - 1].gpu);
	}
	for (; device_count; device_count--) {
		int fd = devices[device_count - 1].fd;

		if (mpsd_descriptors_is(0, fd))
			ioctl(fd, RM_FREE, &devices[device_count - 1].of);
	}
	pthread_mutex_unlock(&lock);
	if (imitated)
		imitated();
	return unused;
}

void mpsd_remains_end(void)
{
	if (mpsd_read_number("MPSD_FAILOVER_GIVE_BACK", 1, 1, 0, 1))
		mpsd_thread_start(give_back, NULL);
}
