// SPDX-License-Identifier: MIT
/*
 * The driver's library closes only some of its device files when it is unloaded: the others stay, and
 * with them what the driver and mpsd keep for an address space. Which are a copy's own is known by its calls of
 * ioctl(), and what it closes by those of close(). A number that another copy has used since is that one's; none is
 * what was exported from a copy or imported into it, or became another device's behind its back.
 */
#include "failover/descriptors.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <unistd.h>

#include "failover/copy.h"

#define MOST 4096	/* numbers above are not followed */
#define BITS 64

static atomic_uint_least64_t used[MPSD_COPY_NUMBERS][MOST / BITS];
static atomic_uint_least64_t devices[MOST];	/* which it was when it was used first */

static bool is_used(unsigned int number, int fd)
{
	return atomic_load_explicit(&used[number][fd / BITS], memory_order_relaxed) >> fd % BITS & 1;
}

static void forget(unsigned int number, int fd)
{
	atomic_fetch_and(&used[number][fd / BITS], ~(1ull << fd % BITS));
}

static uint64_t device_of(int fd)
{
	struct stat file;

	return !fstat(fd, &file) && S_ISCHR(file.st_mode) ? file.st_rdev : 0;
}

void mpsd_descriptors_used(unsigned int number, int fd)
{
	if (fd < 0 || fd >= MOST || is_used(number, fd))
		return;
	for (unsigned int other = 0; other < MPSD_COPY_NUMBERS; other++)
		forget(other, fd);
	atomic_store(&devices[fd], device_of(fd));
	atomic_fetch_or(&used[number][fd / BITS], 1ull << fd % BITS);
}

void mpsd_descriptors_given(int fd)
{
	for (unsigned int number = 0; fd >= 0 && fd < MOST && number < MPSD_COPY_NUMBERS; number++)
		forget(number, fd);
}

void mpsd_descriptors_end(unsigned int number)
{
	for (int fd = 0; fd < MOST; fd++) {
		uint64_t device;

		if (!is_used(number, fd))
			continue;
		forget(number, fd);
		device = device_of(fd);
		if (device && device == atomic_load(&devices[fd]))
			close(fd);
	}
}

static int own_close(unsigned int number, int fd)
{
	/* Before another thread can have it. */
	if (fd >= 0 && fd < MOST)
		forget(number, fd);
	return close(fd);
}

#define OWN_CLOSE(number)			\
	static int own_close_##number(int fd)	\
	{					\
		return own_close(number, fd);	\
	}

OWN_CLOSE(0)
OWN_CLOSE(1)
OWN_CLOSE(2)

void *mpsd_descriptors_close(unsigned int number)
{
	static int (*const own[])(int fd) = { own_close_0, own_close_1, own_close_2 };

	_Static_assert(sizeof(own) / sizeof(*own) == MPSD_COPY_NUMBERS, "each copy has its own");
	return (void *)own[number];
}
