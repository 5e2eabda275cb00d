// SPDX-License-Identifier: MIT
/*
 * Replacements of bind() and getenv() for a further libcuda instance. No library finds these functions by
 * accident: each is exported under a name of its own, for a changed slot of the instance, and under the
 * name of the instance's changed symbol (-D on the compiler's command line).
 *
 * The thread tells which instance calls: failover_begin() comes before a call into the instance that reads
 * the environment, failover_end() after it.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#define OWNERS_NAME "cuda-uvmfd-"
#define PIPE "CUDA_MPS_PIPE_DIRECTORY"

enum { BINDS, RENAMED, READS, PIPE_READS, FOREIGN_PIPE_READS, COUNTS };

static _Thread_local const char *pipe_directory;
static _Thread_local int copy;
static unsigned long counts[COUNTS];

static void one_more(int what)
{
	__atomic_add_fetch(&counts[what], 1, __ATOMIC_RELAXED);
}

/* The directory stays the caller's, and must live until failover_end(). */
void failover_begin(const char *directory, int number)
{
	pipe_directory = directory;
	copy = number;
}

void failover_end(void)
{
	pipe_directory = NULL;
}

unsigned long failover_count(int what)
{
	return what >= 0 && what < COUNTS ? counts[what] : 0;
}

int failover_bind(int fd, const struct sockaddr *address, socklen_t length)
{
	const struct sockaddr_un *given = (const struct sockaddr_un *)address;
	struct sockaddr_un own = { .sun_family = AF_UNIX };
	int said;

	one_more(BINDS);
	if (address->sa_family != AF_UNIX || given->sun_path[0] ||
	    strncmp(given->sun_path + 1, OWNERS_NAME, strlen(OWNERS_NAME)) != 0)
		return bind(fd, address, length);
	one_more(RENAMED);
	said = snprintf(own.sun_path + 1, sizeof(own.sun_path) - 1, "mpsd-copy-%d-%.*s", copy,
			(int)(length - sizeof(sa_family_t) - 1), given->sun_path + 1);
	return bind(fd, (struct sockaddr *)&own, (socklen_t)(sizeof(sa_family_t) + 1 + (size_t)said));
}

static char *read_for_copy(const char *name, char *real)
{
	one_more(READS);
	if (strcmp(name, PIPE) != 0)
		return real;
	one_more(pipe_directory ? PIPE_READS : FOREIGN_PIPE_READS);
	return pipe_directory ? (char *)pipe_directory : real;
}

char *failover_getenv(const char *name)
{
	return read_for_copy(name, getenv(name));
}

char *failover_secure_getenv(const char *name)
{
	return read_for_copy(name, secure_getenv(name));
}

int renamed_bind(int fd, const struct sockaddr *address, socklen_t length) __asm__(BIND_NAME);
char *renamed_getenv(const char *name) __asm__(GETENV_NAME);
char *renamed_secure_getenv(const char *name) __asm__(SECURE_GETENV_NAME);

int renamed_bind(int fd, const struct sockaddr *address, socklen_t length)
{
	return failover_bind(fd, address, length);
}

char *renamed_getenv(const char *name)
{
	return failover_getenv(name);
}

char *renamed_secure_getenv(const char *name)
{
	return failover_secure_getenv(name);
}
