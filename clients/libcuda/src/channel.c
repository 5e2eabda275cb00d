// SPDX-License-Identifier: MIT
#include "channel.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "grant.h"

#define ANSWER_S 5

static atomic_int channel = -1;

static char path[sizeof(((struct sockaddr_un *)0)->sun_path)];
static uint8_t token[MPSD_VAULT_TOKEN_ROOM];

/* Once: the environment is the program's, and it may change it. */
static void read_environment(void)
{
	const char *where = secure_getenv("MPSD_VAULT_SOCKET"), *secret = secure_getenv("MPSD_VAULT_TOKEN");

	if (where && strlen(where) < sizeof(path))
		strcpy(path, where);
	if (secret)
		memcpy(token, secret, strnlen(secret, sizeof(token)));
}

const char *mpsd_channel_path(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, read_environment);
	return *path ? path : NULL;
}

bool mpsd_channel_is_open(void)
{
	return atomic_load(&channel) >= 0;
}

bool mpsd_channel_close(void)
{
	int fd = atomic_exchange(&channel, -1);

	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

static bool join(void)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	struct timeval patience = { .tv_sec = ANSWER_S };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return false;
	/* Also for connect(2), where nobody accepts. */
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	strcpy(address.sun_path, path);
	if (connect(fd, (struct sockaddr *)&address, sizeof(address))) {
		close(fd);
		return false;
	}
	atomic_store(&channel, fd);
	return true;
}

bool mpsd_channel_say(const struct mpsd_vault_message *message, int fd)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(int))];
	} control = { .room = { 0 } };
	struct iovec part = { (void *)message, sizeof(*message) };
	struct msghdr whole = { .msg_iov = &part, .msg_iovlen = 1 };

	if (fd >= 0) {
		whole.msg_control = &control;
		whole.msg_controllen = sizeof(control.room);
		control.head.cmsg_level = SOL_SOCKET;
		control.head.cmsg_type = SCM_RIGHTS;
		control.head.cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(&control.head), &fd, sizeof(fd));
	}
	return sendmsg(atomic_load(&channel), &whole, MSG_NOSIGNAL) == (ssize_t)sizeof(*message);
}

int mpsd_channel_answer(const struct mpsd_vault_message *asked, struct mpsd_vault_message *answer)
{
	ssize_t size;

	do
		size = recv(atomic_load(&channel), answer, sizeof(*answer), 0);
	while (size < 0 && errno == EINTR);
	if (size != (ssize_t)sizeof(*answer) || answer->magic != MPSD_VAULT_MAGIC ||
	    answer->version != MPSD_VAULT_VERSION || answer->kind != asked->kind + MPSD_VAULT_ANSWER ||
	    answer->sequence != asked->sequence)
		return -1;
	return (int)answer->status;
}

int mpsd_channel_hear(const struct mpsd_vault_message *asked)
{
	struct mpsd_vault_message answer;

	return mpsd_channel_answer(asked, &answer);
}

struct mpsd_vault_message mpsd_channel_message(enum mpsd_vault_kind kind)
{
	static uint32_t sequence;

	return (struct mpsd_vault_message){
		.magic = MPSD_VAULT_MAGIC,
		.version = MPSD_VAULT_VERSION,
		.kind = (uint16_t)kind,
		.sequence = ++sequence,
	};
}

/* MPSD_VAULT_TOKEN, cut or filled up with zeros: whoever has it comes back from any cgroup. */
bool mpsd_channel_open(void)
{
	struct mpsd_vault_message hello = mpsd_channel_message(MPSD_VAULT_HELLO);

	if (!join())
		return false;
	memcpy(hello.token, token, sizeof(hello.token));
	return mpsd_channel_say(&hello, -1) && mpsd_channel_hear(&hello) == MPSD_VAULT_OK && mpsd_grant_ask();
}
