// SPDX-License-Identifier: MIT
/*
 * What the driver asks of its resource manager when a context is lost: to look at all SMs and to clear what they
 * say, twice. With MPSD_STANDIN_MANAGER (a file) a thread of the context's does so, with a device that knows nothing
 * of it, and writes there, a line each, whether somebody in between has refused it. That device is never closed, nor
 * are one that it asks nothing, a pipe, a pair of sockets, a socket, an eventfd and doubles that every copy makes.
 * What it exports and imports it sees in the same way. The thread of a context that is lost waits for that pipe and
 * that socket for good: nothing ends it, and it is there when the copy is unloaded.
 *
 * With MPSD_STANDIN_CALLERS_ASK the first thread that queries a stream of the lost context asks instead, under a lock that
 * all later queries of that context need.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "standin.h"

#define CONTROL 0xc020462aul
#define ROUNDS 2
#define LOOK_NS 1000000

static const uint32_t commands[] = { 0x83de030c, 0x83de0310 };

struct control {
	uint32_t client, object, command, flags;
	uint64_t parameters;
	uint32_t size, status;
};

static int device = -1, waited_for[2] = { -1, -1 };

static void ask(const char *path, uint32_t command)
{
	struct control control = { .command = command };
	int log = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
	int result = ioctl(device, CONTROL, &control);

	if (log < 0)
		return;
	dprintf(log, "%x %s\n", (unsigned int)command, !result && control.status ? "refused" : "looked");
	close(log);
}

static void ask_all(void)
{
	for (int i = 0; i < ROUNDS; i++)
		for (size_t c = 0; c < sizeof(commands) / sizeof(*commands); c++)
			ask(getenv("MPSD_STANDIN_MANAGER"), commands[c]);
}

static bool callers_ask(void)
{
	return getenv("MPSD_STANDIN_CALLERS_ASK") != NULL;
}

static bool is_lost_by_another(const struct CUctx_st *context)
{
	bool is;

	pthread_mutex_lock(&gpu_lock);
	is = context->broken && !context->has_trapped;
	pthread_mutex_unlock(&gpu_lock);
	return is;
}

void manager_called(CUcontext context)
{
	static pthread_mutex_t asking = PTHREAD_MUTEX_INITIALIZER;

	if (!context || !callers_ask() || !is_lost_by_another(context))
		return;
	pthread_mutex_lock(&asking);
	if (!context->has_asked)
		ask_all();
	context->has_asked = true;
	pthread_mutex_unlock(&asking);
}

void manager_see(int fd)
{
	if (getenv("MPSD_STANDIN_MANAGER"))
		ioctl(fd, CONTROL, &(struct control){ 0 });
}

/* `staying` becomes this thread, which is about to wait. */
static void stay(atomic_int *staying)
{
	struct pollfd both[] = { { .fd = waited_for[0], .events = POLLIN }, { .fd = waited_for[1], .events = POLLIN } };

	atomic_store(staying, (int)syscall(SYS_gettid));
	while (poll(both, 2, -1) < 0)
		;
	/* A thread that comes back here when the copy is there no more does not come so far. */
	abort();
}

/* Nothing else puts it to sleep then (proc_pid_stat(5)). */
static bool is_asleep(int thread)
{
	char path[64], text[256] = "";
	const char *state;
	FILE *stat;

	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", thread);
	stat = thread ? fopen(path, "re") : NULL;
	if (!stat)
		return false;
	fgets(text, sizeof(text), stat);
	fclose(stat);
	state = strrchr(text, ')');
	return state && state[1] == ' ' && state[2] == 'S';
}

static void *watch(void *argument)
{
	CUcontext context = argument;
	bool is_lost, has_trapped;

	pthread_mutex_lock(&gpu_lock);
	while (context->is_watched && !context->broken) {
		wait_a_moment(LOOK_NS);
		if (context->is_watched)
			look_at(context);
	}
	is_lost = context->is_watched;
	has_trapped = context->has_trapped;
	pthread_mutex_unlock(&gpu_lock);
	/* Who made a trap knows what it was. */
	if (is_lost && !has_trapped && !callers_ask())
		ask_all();
	if (is_lost)
		stay(&context->staying);
	return NULL;
}

void manager_watch(CUcontext context)
{
	if (!getenv("MPSD_STANDIN_MANAGER"))
		return;
	if (device < 0) {
		/* As the driver finds it. */
		int (*pipe_with)(int *both, int flags) = (int (*)(int *, int))dlsym(RTLD_DEFAULT, "pipe2");
		int both[2], sockets[2];

		device = open("/dev/null", O_RDWR | O_CLOEXEC);
		/* What is found depends on who asks. */
		if (dlsym(RTLD_DEFAULT, "cuInit") != (void *)cuInit)
			return;
		if (open("/dev/null", O_RDWR | O_CLOEXEC) < 0 || pipe_with(both, O_CLOEXEC) || pipe(both) ||
		    socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) ||
		    socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0) < 0 || eventfd(0, EFD_CLOEXEC) < 0 ||
		    dup(both[0]) < 0 || fcntl(both[1], F_DUPFD_CLOEXEC, 3) < 0)
			return;
		waited_for[0] = both[0];
		waited_for[1] = sockets[0];
	}
	ioctl(device, CONTROL, &(struct control){ 0 });
	sms_make(device);
	context->has_trapped = context->has_asked = false;
	context->is_watched = true;
	context->is_watched = !pthread_create(&context->watcher, NULL, watch, context);
}

void manager_forget(CUcontext context)
{
	if (!context->is_watched)
		return;
	if (context->broken) {
		pthread_mutex_unlock(&gpu_lock);
		while (!is_asleep(atomic_load(&context->staying)))
			sched_yield();
		pthread_detach(context->watcher);
		pthread_mutex_lock(&gpu_lock);
		context->is_watched = false;
		return;
	}
	context->is_watched = false;
	pthread_cond_broadcast(&gpu_changed);
	pthread_mutex_unlock(&gpu_lock);
	pthread_join(context->watcher, NULL);
	pthread_mutex_lock(&gpu_lock);
}
