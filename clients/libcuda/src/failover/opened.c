// SPDX-License-Identifier: MIT
/*
 * The calls that make descriptors, and those that wait for one, as a second copy of the driver makes them: what it
 * opens is its own. A thread of the driver's that has lost its context waits for good, and is still there when the copy
 * is unloaded; it comes back when the other end of what it waits for is closed with the copy, to code that is gone.
 */
#include "failover/opened.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "failover/copy.h"
#include "failover/descriptors.h"
#include "failover/maps.h"

static int made(unsigned int number, int fd)
{
	mpsd_descriptors_made(number, fd);
	return fd;
}

static int made_both(unsigned int number, const int *both, int result)
{
	for (int i = 0; !result && i < 2; i++)
		mpsd_descriptors_made(number, both[i]);
	return result;
}

/* The number was the caller's choice, so that it may be the program's: the copy's it is where it was before. */
static int moved(unsigned int number, int fd, int result)
{
	return fd != result && mpsd_descriptors_is(number, result) ? made(number, result) : result;
}

static int duplicated(unsigned int number, int command, int result)
{
	return command == F_DUPFD || command == F_DUPFD_CLOEXEC ? made(number, result) : result;
}

static ssize_t received(unsigned int number, struct msghdr *message, ssize_t result)
{
	struct cmsghdr *part = result < 0 ? NULL : CMSG_FIRSTHDR(message);

	for (; part; part = CMSG_NXTHDR(message, part)) {
		size_t fds = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < fds; i++)
			mpsd_descriptors_made(number, ((const int *)CMSG_DATA(part))[i]);
	}
	return result;
}

static ssize_t came_back(unsigned int number, unsigned int ends, ssize_t result)
{
	mpsd_copy_come_back(number, ends);
	return result;
}

/*
 * The driver looks pipe2() and its like up, for the C library may be too old to have them. Whatever else it looks up
 * must be looked up by itself, for where is searched depends on who asks: a jump of the compiler's, not a call.
 */
static bool is_made(const char *symbol);
static void *own_of(unsigned int number, const char *symbol, void *result);

#define OWN_CALLS(number)										\
	static int own_open_##number(const char *path, int flags, ...)					\
	{												\
		va_list more;										\
		mode_t mode;										\
													\
		va_start(more, flags);									\
		mode = va_arg(more, mode_t);								\
		va_end(more);										\
		return made(number, mpsd_maps_is(path) ? mpsd_maps_open() : open(path, flags, mode));	\
	}												\
	static int own_pipe_##number(int *both)								\
	{												\
		return made_both(number, both, pipe(both));						\
	}												\
	static int own_pipe2_##number(int *both, int flags)						\
	{												\
		return made_both(number, both, pipe2(both, flags));					\
	}												\
	static int own_socketpair_##number(int domain, int type, int protocol, int *both)		\
	{												\
		return made_both(number, both, socketpair(domain, type, protocol, both));		\
	}												\
	static int own_socket_##number(int domain, int type, int protocol)				\
	{												\
		return made(number, socket(domain, type, protocol));					\
	}												\
	static int own_eventfd_##number(unsigned int count, int flags)					\
	{												\
		return made(number, eventfd(count, flags));						\
	}												\
	static int own_dup_##number(int fd)								\
	{												\
		return made(number, dup(fd));								\
	}												\
	static int own_dup2_##number(int fd, int to)							\
	{												\
		return moved(number, fd, dup2(fd, to));							\
	}												\
	static int own_dup3_##number(int fd, int to, int flags)						\
	{												\
		return moved(number, fd, dup3(fd, to, flags));						\
	}												\
	static int own_fcntl_##number(int fd, int command, ...)						\
	{												\
		va_list more;										\
		void *argument;										\
													\
		va_start(more, command);								\
		argument = va_arg(more, void *);							\
		va_end(more);										\
		return duplicated(number, command, fcntl(fd, command, argument));			\
	}												\
	static int own_accept4_##number(int socket, struct sockaddr *from, socklen_t *size, int flags)	\
	{												\
		unsigned int ends = atomic_load(&mpsd_copy_ends[number]);				\
													\
		return made(number, (int)came_back(number, ends, accept4(socket, from, size, flags)));	\
	}												\
	static void *own_dlsym_##number(void *library, const char *symbol)				\
	{												\
		return is_made(symbol) ? own_of(number, symbol, dlsym(library, symbol))			\
				       : dlsym(library, symbol);					\
	}												\
	static void *own_dlvsym_##number(void *library, const char *symbol, const char *version)	\
	{												\
		return is_made(symbol) ? own_of(number, symbol, dlvsym(library, symbol, version))	\
				       : dlvsym(library, symbol, version);				\
	}												\
	static ssize_t own_recvmsg_##number(int socket, struct msghdr *message, int flags)		\
	{												\
		unsigned int ends = atomic_load(&mpsd_copy_ends[number]);				\
													\
		return received(number, message,							\
				came_back(number, ends, recvmsg(socket, message, flags)));		\
	}												\
	static ssize_t own_read_##number(int fd, void *into, size_t size)				\
	{												\
		unsigned int ends = atomic_load(&mpsd_copy_ends[number]);				\
													\
		return came_back(number, ends, read(fd, into, size));					\
	}												\
	static int own_poll_##number(struct pollfd *fds, nfds_t count, int ms)				\
	{												\
		unsigned int ends = atomic_load(&mpsd_copy_ends[number]);				\
													\
		return (int)came_back(number, ends, poll(fds, count, ms));				\
	}

OWN_CALLS(1)
OWN_CALLS(2)
OWN_CALLS(3)

#define OF_EACH(call) { (void *)call, { (void *)own_##call##_1, (void *)own_##call##_2, (void *)own_##call##_3 } }

static const struct {
	const char *symbol;
	struct {
		void *plain, *own[MPSD_COPY_NUMBERS - 1];
	} call;
} calls[] = {
	{ "open", OF_EACH(open) },
	{ "open64", OF_EACH(open) },
	{ "pipe", OF_EACH(pipe) },
	{ "pipe2", OF_EACH(pipe2) },
	{ "socketpair", OF_EACH(socketpair) },
	{ "socket", OF_EACH(socket) },
	{ "eventfd", OF_EACH(eventfd) },
	{ "dup", OF_EACH(dup) },
	{ "dup2", OF_EACH(dup2) },
	{ "dup3", OF_EACH(dup3) },
	{ "fcntl", OF_EACH(fcntl) },
	{ "fcntl64", OF_EACH(fcntl) },
	{ "recvmsg", OF_EACH(recvmsg) },
	{ "read", OF_EACH(read) },
	{ "poll", OF_EACH(poll) },
	{ "accept4", OF_EACH(accept4) },
	{ "dlsym", OF_EACH(dlsym) },
	{ "dlvsym", OF_EACH(dlvsym) },
};

#define CALLS (sizeof(calls) / sizeof(*calls))

static size_t find(const char *symbol)
{
	size_t i = 0;

	while (i < CALLS && strcmp(symbol, calls[i].symbol))
		i++;
	return i;
}

void *mpsd_opened_call(const char *symbol, unsigned int number)
{
	size_t i = find(symbol);

	_Static_assert(MPSD_COPY_NUMBERS == 4, "each second copy has its own");
	return i < CALLS ? calls[i].call.own[number - 1] : NULL;
}

static bool is_made(const char *symbol)
{
	return !strcmp(symbol, "close") || find(symbol) < CALLS;
}

/* In place of the C library's own, and of nothing else that has the name. */
static void *own_of(unsigned int number, const char *symbol, void *result)
{
	if (!strcmp(symbol, "close"))
		return result == (void *)close ? mpsd_descriptors_close(number) : result;
	return result == calls[find(symbol)].call.plain ? mpsd_opened_call(symbol, number) : result;
}
