// SPDX-License-Identifier: MIT
/*
 * The back end on mpsd's simulated GPU (MPSD_STANDIN_GPU=simulated): the context joins the MPS server
 * that CUDA_MPS_PIPE_DIRECTORY leads to, so that mpsd sees a client like any other, and faults are
 * the simulated GPU's: it decides who dies of them. Memory is still this process's own.
 *
 * The wire is that of mpsd/gpu/simulated/packets.py: a JSON object per packet, descriptors beside it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "standin.h"

#define PACKET 65536
#define DESCRIPTORS 8

struct answer {
	char text[PACKET];
	int descriptors[DESCRIPTORS];
	size_t count;
};

static int channel = -1;
/* Shared with the GPU (mpsd/gpu/simulated/machine/halts.py). */
static struct {
	atomic_uint is_halted, running;
} *words;
static __thread bool is_running;	/* this thread's operation is counted there */
static int held[DESCRIPTORS];	/* the context's descriptors: mpsd duplicates them from here */
static size_t held_count;
static unsigned int last_request;
static struct answer answer;	/* one at a time: the lock is held */

static int connect_to(const char *directory, const char *name)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int length = snprintf(address.sun_path, sizeof(address.sun_path), "%s/%s", directory, name);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (fd < 0 || length >= (int)sizeof(address.sun_path) ||
	    connect(fd, (struct sockaddr *)&address, sizeof(address))) {
		if (fd >= 0)
			close(fd);
		return -1;
	}
	return fd;
}

static bool receive(int fd)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(int) * DESCRIPTORS)];
	} control;
	struct iovec part = { answer.text, sizeof(answer.text) - 1 };
	struct msghdr message = {
		.msg_iov = &part,
		.msg_iovlen = 1,
		.msg_control = &control,
		.msg_controllen = sizeof(control),
	};
	ssize_t size = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
	struct cmsghdr *head;

	answer.count = 0;
	if (size <= 0)
		return false;
	answer.text[size] = 0;
	head = CMSG_FIRSTHDR(&message);
	if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS) {
		answer.count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		memcpy(answer.descriptors, CMSG_DATA(head), answer.count * sizeof(int));
	}
	return true;
}

static bool call(int fd, const char *request)
{
	return send(fd, request, strlen(request), MSG_NOSIGNAL) >= 0 && receive(fd);
}

/* The answers are flat and written without spaces; null reads as 0. */
static long number(const char *key)
{
	char wanted[32];
	const char *at;

	snprintf(wanted, sizeof(wanted), "\"%s\":", key);
	at = strstr(answer.text, wanted);
	return at ? strtol(at + strlen(wanted), NULL, 10) : 0;
}

static void string(const char *key, char *to, size_t size)
{
	char wanted[32];
	const char *at;

	snprintf(wanted, sizeof(wanted), "\"%s\":\"", key);
	at = strstr(answer.text, wanted);
	snprintf(to, size, "%.*s", at ? (int)strcspn(at + strlen(wanted), "\"") : 0, at ? at + strlen(wanted) : "");
}

/* Which server, on which node; nobody who answers means a context without MPS. */
static CUresult join(long *server, char *node, size_t size)
{
	const char *named = getenv("MPSD_SIM_DIR");
	int fd = connect_to(*pipe_directory ? pipe_directory : "/tmp/nvidia-mps", "control");
	char request[64];
	bool heard;

	*server = 0;
	snprintf(node, size, "%s", named ? named : "");
	if (fd < 0)
		return CUDA_SUCCESS;
	snprintf(request, sizeof(request), "{\"client\":%d}", (int)getpid());
	heard = call(fd, request);
	close(fd);
	if (!heard)
		return CUDA_ERROR_MPS_CONNECTION_FAILED;
	if (number("error"))
		return (CUresult)number("error");
	*server = number("server");
	string("node", node, size);
	return CUDA_SUCCESS;
}

static void command_name(char *to, size_t size)
{
	char name[16] = "";

	prctl(PR_GET_NAME, name);
	for (char *at = name; *at; at++)
		if (*at == '"' || *at == '\\' || (unsigned char)*at < ' ')
			*at = '?';
	snprintf(to, size, "%s", name);
}

/* A request on the context's connection; answers to earlier ones were all read. */
static CUresult ask(const char *operation)
{
	char request[128];

	snprintf(request, sizeof(request), "{\"op\":\"%s\",\"id\":%u}", operation, ++last_request);
	return call(channel, request) ? (CUresult)number("error") : CUDA_ERROR_DEVICE_UNAVAILABLE;
}

static bool share_words(void)
{
	void *at = MAP_FAILED;

	if (ask("halt") == CUDA_SUCCESS && answer.count == 1)
		at = mmap(NULL, sizeof(*words), PROT_READ | PROT_WRITE, MAP_SHARED, answer.descriptors[0], 0);
	while (answer.count)
		close(answer.descriptors[--answer.count]);
	words = at == MAP_FAILED ? NULL : at;
	return words != NULL;
}

/* Counted first: the GPU looks at the number after it has halted. */
static bool begin(void)
{
	if (!words)
		return true;
	atomic_fetch_add(&words->running, 1);
	is_running = !atomic_load(&words->is_halted);
	if (!is_running)
		atomic_fetch_sub(&words->running, 1);
	return is_running;
}

static bool end(void)
{
	bool was = is_running;

	if (was)
		atomic_fetch_sub(&words->running, 1);
	is_running = false;
	return was || !words;
}

static bool is_halted(void)
{
	return words && atomic_load(&words->is_halted);
}

static void detach(void)
{
	if (channel < 0)
		return;
	ask("close");
	close(channel);
	channel = -1;
	if (words)
		munmap(words, sizeof(*words));
	words = NULL;
	while (held_count)
		close(held[--held_count]);
}

static CUresult attach(void)
{
	char node[512], command[16], request[256], by[32] = "null";
	CUresult result;
	long server;

	result = join(&server, node, sizeof(node));
	if (result != CUDA_SUCCESS)
		return result;
	/* As libcuda need not, for it is root that duplicates there: mpsd in tests is an ordinary user. */
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
	channel = connect_to(node, "gpu.sock");
	if (channel < 0)
		return CUDA_ERROR_NO_DEVICE;
	if (server)
		snprintf(by, sizeof(by), "%ld", server);
	command_name(command, sizeof(command));
	snprintf(request, sizeof(request), "{\"op\":\"attach\",\"server\":%s,\"command\":\"%s\"}", by, command);
	result = call(channel, request) ? (CUresult)number("error") : CUDA_ERROR_NO_DEVICE;
	if (result != CUDA_SUCCESS) {
		close(channel);
		channel = -1;
		return result;
	}
	held_count = answer.count;
	memcpy(held, answer.descriptors, sizeof(held));
	if (share_words())
		return CUDA_SUCCESS;
	detach();
	return CUDA_ERROR_NO_DEVICE;
}

static bool lay(const char *operation, CUdeviceptr base, size_t size)
{
	char request[128];

	snprintf(request, sizeof(request), "{\"op\":\"%s\",\"base\":%llu,\"length\":%zu}", operation, base, size);
	return channel >= 0 && call(channel, request) && !number("error");
}

static bool cover(CUdeviceptr base, size_t size, bool managed)
{
	return lay(managed ? "managed" : "sparse", base, size);
}

static void uncover(CUdeviceptr base, size_t size, bool managed)
{
	lay(managed ? "unmanaged" : "unsparse", base, size);
}

/* The misdeed is done on the simulated GPU. A stray access may well succeed: where a guard absorbs it. */
static CUresult fault(CUdeviceptr address, enum access access)
{
	static const char *const kinds[] = { [ACCESS_READ] = "load", [ACCESS_WRITE] = "store", [ACCESS_NONE] = "trap" };
	/* Its answer may come after the halt, which would wait for it. */
	bool was = end();
	char request[128];
	CUresult result;

	snprintf(request, sizeof(request), "{\"op\":\"launch\",\"k\":[\"%s\",%llu,1,1,0,false]}",
		 kinds[access], address);
	if (send(channel, request, strlen(request), MSG_NOSIGNAL) < 0)
		return CUDA_ERROR_DEVICE_UNAVAILABLE;
	result = ask("sync");
	/* It was absorbed; or it counts as complete, and nothing begins after it. */
	if (was && result == CUDA_SUCCESS)
		begin();
	return result;
}

static CUresult look(void)
{
	return ask("sync");
}

const struct backend *simulated_backend(const struct backend *memory)
{
	static struct backend simulated;

	simulated = *memory;
	simulated.name = "simulated";
	simulated.attach = attach;
	simulated.detach = detach;
	simulated.cover = cover;
	simulated.uncover = uncover;
	simulated.fault = fault;
	simulated.look = look;
	simulated.begin = begin;
	simulated.end = end;
	simulated.is_halted = is_halted;
	return &simulated;
}
