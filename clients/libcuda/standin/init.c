// SPDX-License-Identifier: MIT
/*
 * The beginning and the end of the library. As the real one, which may be in a process several times, each
 * copy (another file) a driver for itself: nothing is shared but a name, which stands for the process and
 * which only one copy can have.
 */
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "standin.h"

pthread_rwlock_t gpu_memory = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;

char pipe_directory[512];

static int state;	/* 0 not initialised, 1 initialised, 2 the child of a process that was */
static int name_holder = -1;

/*
 * A forked child has none of the threads: like the real driver it is not initialised, for good. The name is
 * not its own either.
 */
static void after_fork(void)
{
	if (state)
		state = 2;
	if (name_holder >= 0)
		close(name_holder);
	name_holder = -1;
}

__attribute__((constructor)) static void watch_forks(void)
{
	pthread_atfork(NULL, NULL, after_fork);
}

CUresult is_initialised(void)
{
	return __atomic_load_n(&state, __ATOMIC_ACQUIRE) == 1 ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

/* The real driver's socket has this name too; what it is for does not matter here. */
static bool take_name(void)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	struct stat space;
	int length, fd;

	if (stat("/proc/self/ns/pid", &space))
		return false;
	length = snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "cuda-uvmfd-%lu-%d",
			  (unsigned long)space.st_ino, (int)getpid());
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd >= 0 && bind(fd, (struct sockaddr *)&address,
			    (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length))) {
		close(fd);
		fd = -1;
	}
	name_holder = fd;
	return fd >= 0;
}

void note(const char *what)
{
	const char *log = getenv("MPSD_STANDIN_NOTES");
	int fd = log ? open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;

	if (fd < 0)
		return;
	dprintf(fd, "%s %s\n", pipe_directory, what);
	close(fd);
}

bool refuses_saves(void)
{
	const char *where = getenv("MPSD_STANDIN_REFUSES_SAVES");

	return where && !strcmp(where, pipe_directory);
}

/* As a real driver may where its server is lost at the wrong moment. */
static void close_input(void)
{
	const char *where = getenv("MPSD_STANDIN_CLOSES_INPUT");

	if (where && !strcmp(where, pipe_directory))
		close(STDIN_FILENO);
}

static CUresult initialise(void)
{
	const char *directory, *connections = getenv("CUDA_DEVICE_MAX_COPY_CONNECTIONS");

	if (!take_name())
		return CUDA_ERROR_OPERATING_SYSTEM;
	directory = getenv("CUDA_MPS_PIPE_DIRECTORY");
	snprintf(pipe_directory, sizeof(pipe_directory), "%s", directory ? directory : "");
	/* How many channels the real driver makes for copies. */
	note(connections ? connections : "usual");
	choose_backend();
	gate_find();
	close_input();
	__atomic_store_n(&state, 1, __ATOMIC_RELEASE);
	return CUDA_SUCCESS;
}

API CUresult cuInit(unsigned int Flags)
{
	CUresult result = CUDA_SUCCESS;

	if (Flags)
		return CUDA_ERROR_INVALID_VALUE;
	/* The child of a threaded process need not ever get the lock. */
	if (__atomic_load_n(&state, __ATOMIC_ACQUIRE))
		return is_initialised();
	pthread_mutex_lock(&gpu_lock);
	if (!state)
		result = initialise();
	result = leave(result == CUDA_SUCCESS ? is_initialised() : result);
	gate_keep(GATE_INIT);
	return result;
}

/*
 * The file is unloaded, or the process ends. With a context there are threads, which only its end could
 * end: then everything stays as it is, but for the threads that have ended. A thread that is in the driver now keeps
 * what it uses too.
 */
__attribute__((destructor)) static void unload(void)
{
	if (state == 2 || pthread_mutex_trylock(&gpu_lock))
		return;
	for (CUdevice device = 0; device < MOST_DEVICES; device++)
		join_streams(primary_of(device));
	if (!is_any_retained()) {
		close_reservations();
		close_physical();
		close_device_file();
		close_pools();
		forget_ranges();
		gate_forget();
		if (name_holder >= 0)
			close(name_holder);
		name_holder = -1;
	}
	pthread_mutex_unlock(&gpu_lock);
}
