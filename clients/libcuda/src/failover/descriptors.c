// SPDX-License-Identifier: MIT
/*
 * The driver's library closes only some of its descriptors when it is unloaded: device files stay, and with them
 * what the driver and mpsd keep for an address space, and the pipes, sockets and eventfds of threads that have ended.
 * Which are a copy's own is known by the calls that make them (opened.c) and those of ioctl(), and what it closes by
 * those of close(). A number that another copy has used since is that one's; none is what was exported from a copy or
 * imported into it, or became, behind its back, another kind of file, another device, pipe or socket. (Linux gives the
 * ids of eventfds again, so one of those is told from another only while both are open.)
 */
#include "failover/descriptors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "failover/copy.h"

#define MOST 4096	/* numbers above are not followed */
#define BITS 64
#define EVENTFD "eventfd-id:"

static atomic_uint_least64_t used[MPSD_COPY_NUMBERS][MOST / BITS];
static atomic_uint_least64_t files[MPSD_COPY_NUMBERS][MOST];	/* which it was when it was made, or used first */
static atomic_uint standard[MPSD_COPY_NUMBERS];	/* bits of those that a copy made where the program had closed its own */

/* The standard ones are the program's, whatever a copy does with them. */
static bool is_followed(int fd)
{
	return fd > STDERR_FILENO && fd < MOST;
}

static bool is_standard(int fd)
{
	return fd >= STDIN_FILENO && fd <= STDERR_FILENO;
}

bool mpsd_descriptors_is(unsigned int number, int fd)
{
	return is_followed(fd) &&
	       (atomic_load_explicit(&used[number][fd / BITS], memory_order_relaxed) >> fd % BITS & 1);
}

/* Whether it was known until now. */
static bool forget(unsigned int number, int fd)
{
	return atomic_fetch_and(&used[number][fd / BITS], ~(1ull << fd % BITS)) >> fd % BITS & 1;
}

/* All eventfds have one inode; proc_pid_fdinfo(5) tells them apart. No memory is taken: dup() may be called anywhere. */
static uint64_t eventfd_of(int fd)
{
	char text[512];
	const char *told;
	ssize_t size;
	int info;

	snprintf(text, sizeof(text), "/proc/self/fdinfo/%d", fd);
	info = open(text, O_RDONLY | O_CLOEXEC);
	if (info < 0)
		return 0;
	size = read(info, text, sizeof(text) - 1);
	close(info);
	text[size < 0 ? 0 : size] = '\0';
	told = strstr(text, EVENTFD);
	return told ? strtoul(told + strlen(EVENTFD), NULL, 10) + 1 : 0;
}

/* Its kind and which it is of that; 0: it is not one of those that are closed for a copy. */
static uint64_t identity_of(int fd)
{
	int error = errno;
	struct stat file;
	uint64_t number;

	if (fstat(fd, &file))
		number = 0;
	else if (S_ISCHR(file.st_mode))
		number = file.st_rdev;
	else if (S_ISFIFO(file.st_mode) || S_ISSOCK(file.st_mode))
		number = file.st_ino;
	else
		number = file.st_mode & S_IFMT ? 0 : eventfd_of(fd);
	errno = error;
	return number ? (uint64_t)(file.st_mode & S_IFMT) << 48 | (number & ((1ull << 60) - 1)) : 0;
}

static bool is_device(uint64_t file)
{
	return file >> 60 == S_IFCHR >> 12;
}

static void claim(unsigned int number, int fd, uint64_t file)
{
	for (unsigned int other = 0; other < MPSD_COPY_NUMBERS; other++)
		forget(other, fd);
	if (!file)
		return;
	atomic_store(&files[number][fd], file);
	atomic_fetch_or(&used[number][fd / BITS], 1ull << fd % BITS);
}

void mpsd_descriptors_made(unsigned int number, int fd)
{
	if (is_followed(fd))
		claim(number, fd, identity_of(fd));
	else if (is_standard(fd))
		atomic_fetch_or(&standard[number], 1u << fd);
}

/* Of what is no device it proves nothing: the program's own may be meant. */
void mpsd_descriptors_used(unsigned int number, int fd)
{
	uint64_t file;

	if (!is_followed(fd) || mpsd_descriptors_is(number, fd))
		return;
	file = identity_of(fd);
	if (is_device(file))
		claim(number, fd, file);
}

void mpsd_descriptors_given(int fd)
{
	for (unsigned int number = 0; is_followed(fd) && number < MPSD_COPY_NUMBERS; number++)
		forget(number, fd);
}

void mpsd_descriptors_end(unsigned int number)
{
	for (int fd = 0; fd < MOST; fd++) {
		uint64_t file;

		if (!mpsd_descriptors_is(number, fd))
			continue;
		file = atomic_load(&files[number][fd]);
		/* Another copy has it by now? */
		if (forget(number, fd) && file == identity_of(fd))
			close(fd);
	}
}

/*
 * On an H200 the standard input of three programs ended. Their contexts were being made in a domain that faulted at that
 * moment. The driver may have closed descriptor 0, which it had not opened.
 */
static bool belongs_to_program(unsigned int number, int fd)
{
	return is_standard(fd) && !(atomic_fetch_and(&standard[number], ~(1u << fd)) >> fd & 1);
}

static int own_close(unsigned int number, int fd)
{
	/* What the first instance opens is not followed. */
	if (number && belongs_to_program(number, fd))
		return 0;
	/* Before another thread can have it. */
	if (is_followed(fd))
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
OWN_CLOSE(3)

void *mpsd_descriptors_close(unsigned int number)
{
	static int (*const own[])(int fd) = { own_close_0, own_close_1, own_close_2, own_close_3 };

	_Static_assert(sizeof(own) / sizeof(*own) == MPSD_COPY_NUMBERS, "each copy has its own");
	return (void *)own[number];
}
