// SPDX-License-Identifier: MIT
/*
 * The driver's library closes only some of its descriptors when it is unloaded: device files stay, and with them
 * what the driver and mpsd keep for an address space, and the pipes, sockets and eventfds of threads that have ended.
 * Which are a copy's own is known by the calls that make them (opened.c) and those of ioctl(), and what it closes by
 * those of close(). A number that another copy has used since is that one's; none is what was exported from a copy or
 * imported into it, or became another file behind its back.
 */
#include "failover/descriptors.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "failover/copy.h"

#define MOST 4096	/* numbers above are not followed */
#define BITS 64

static atomic_uint_least64_t used[MPSD_COPY_NUMBERS][MOST / BITS];
static atomic_uint_least64_t files[MOST];	/* which it was when it was made, or used first */

static bool is_used(unsigned int number, int fd)
{
	return atomic_load_explicit(&used[number][fd / BITS], memory_order_relaxed) >> fd % BITS & 1;
}

static void forget(unsigned int number, int fd)
{
	atomic_fetch_and(&used[number][fd / BITS], ~(1ull << fd % BITS));
}

/* All eventfds have one inode; proc_pid_fdinfo(5) tells them apart. */
static uint64_t eventfd_of(int fd)
{
	char path[32], line[128];
	unsigned int number;
	uint64_t found = 0;
	FILE *told;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
	told = fopen(path, "re");
	while (told && !found && fgets(line, sizeof(line), told))
		found = sscanf(line, "eventfd-id: %u", &number) == 1 ? number + 1ull : 0;
	if (told)
		fclose(told);
	return found;
}

/* Its kind and which it is of that; 0: it is not one of those that are closed for a copy. */
static uint64_t identity_of(int fd)
{
	struct stat file;
	uint64_t number;

	if (fstat(fd, &file))
		return 0;
	if (S_ISCHR(file.st_mode))
		number = file.st_rdev;
	else if (S_ISFIFO(file.st_mode) || S_ISSOCK(file.st_mode))
		number = file.st_ino;
	else
		number = file.st_mode & S_IFMT ? 0 : eventfd_of(fd);
	return number ? (uint64_t)(file.st_mode & S_IFMT) << 48 | (number & ((1ull << 60) - 1)) : 0;
}

void mpsd_descriptors_made(unsigned int number, int fd)
{
	if (fd < 0 || fd >= MOST)
		return;
	for (unsigned int other = 0; other < MPSD_COPY_NUMBERS; other++)
		forget(other, fd);
	atomic_store(&files[fd], identity_of(fd));
	atomic_fetch_or(&used[number][fd / BITS], 1ull << fd % BITS);
}

void mpsd_descriptors_used(unsigned int number, int fd)
{
	if (fd >= 0 && fd < MOST && !is_used(number, fd))
		mpsd_descriptors_made(number, fd);
}

void mpsd_descriptors_given(int fd)
{
	for (unsigned int number = 0; fd >= 0 && fd < MOST && number < MPSD_COPY_NUMBERS; number++)
		forget(number, fd);
}

void mpsd_descriptors_end(unsigned int number)
{
	for (int fd = 0; fd < MOST; fd++) {
		uint64_t file;

		if (!is_used(number, fd))
			continue;
		forget(number, fd);
		file = identity_of(fd);
		if (file && file == atomic_load(&files[fd]))
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
