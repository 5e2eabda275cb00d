// SPDX-License-Identifier: MIT
#include "channel.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "connect.h"
#include "grant.h"
#include "proxy.h"
#include "vault.h"

#define ANSWER_S 5

static atomic_int channel = -1;

static char path[sizeof(((struct sockaddr_un *)0)->sun_path)];
static uint8_t token[MPSD_VAULT_TOKEN_ROOM];

/* Once: the environment is the program's, and it may change it. */
static void read_environment(void)
{
	const char *where = secure_getenv("MPSD_VAULT_SOCKET"), *secret = secure_getenv("MPSD_VAULT_TOKEN");

	if (!where || strlen(where) >= sizeof(path))
		return;
	/* Cut, it would be that of others, too. */
	if (secret && strlen(secret) > sizeof(token)) {
		mpsd_say("vault disabled: MPSD_VAULT_TOKEN has %zu bytes, the limit is %zu; use a shorter token", strlen(secret), sizeof(token));
		return;
	}
	strcpy(path, where);
	if (secret)
		memcpy(token, secret, strlen(secret));
}

const char *mpsd_channel_path(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, read_environment);
	return *path ? path : NULL;
}

/* vault.h */
bool mpsd_vault_offered(void)
{
	return mpsd_channel_path() != NULL;
}

bool mpsd_channel_is_open(void)
{
	return atomic_load(&channel) >= 0;
}

bool mpsd_channel_is_up(void)
{
	char byte;
	ssize_t size = recv(atomic_load(&channel), &byte, sizeof(byte), MSG_PEEK | MSG_DONTWAIT);

	return size > 0 || (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
}

bool mpsd_channel_close(void)
{
	int fd = atomic_exchange(&channel, -1);

	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

static int connect_to_daemon(void)
{
	return mpsd_connect(path, ANSWER_S, ANSWER_S);
}

static bool say(int where, const struct mpsd_vault_message *message, int fd)
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
	return sendmsg(where, &whole, MSG_NOSIGNAL) == (ssize_t)sizeof(*message);
}

bool mpsd_channel_say(const struct mpsd_vault_message *message, int fd)
{
	return say(atomic_load(&channel), message, fd);
}

static int status_of(const struct mpsd_vault_message *answer, const struct mpsd_vault_message *asked)
{
	if (answer->magic != MPSD_VAULT_MAGIC || answer->version != MPSD_VAULT_VERSION ||
	    answer->kind != asked->kind + MPSD_VAULT_ANSWER || answer->sequence != asked->sequence)
		return -1;
	return (int)answer->status;
}

static int hear(int where, const struct mpsd_vault_message *asked, struct mpsd_vault_message *answer)
{
	ssize_t size;

	do
		size = recv(where, answer, sizeof(*answer), 0);
	while (size < 0 && errno == EINTR);
	return size == (ssize_t)sizeof(*answer) ? status_of(answer, asked) : -1;
}

int mpsd_channel_answer(const struct mpsd_vault_message *asked, struct mpsd_vault_message *answer)
{
	return hear(atomic_load(&channel), asked, answer);
}

int mpsd_channel_hear(const struct mpsd_vault_message *asked)
{
	struct mpsd_vault_message answer;

	return mpsd_channel_answer(asked, &answer);
}

/* As hear, with the descriptor that came with it, or -1. More than one the kernel closes. */
static int hear_all(int where, const struct mpsd_vault_message *asked, struct mpsd_vault_message *answer,
		    int *fd)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec part = { answer, sizeof(*answer) };
	struct msghdr whole = {
		.msg_iov = &part, .msg_iovlen = 1,
		.msg_control = &control, .msg_controllen = sizeof(control.room),
	};
	struct cmsghdr *head;
	ssize_t size;

	*fd = -1;
	do
		size = recvmsg(where, &whole, MSG_CMSG_CLOEXEC);
	while (size < 0 && errno == EINTR);
	if (size < 0)
		return -1;
	head = CMSG_FIRSTHDR(&whole);
	if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS &&
	    head->cmsg_len == CMSG_LEN(sizeof(int)))
		memcpy(fd, CMSG_DATA(head), sizeof(*fd));
	return size == (ssize_t)sizeof(*answer) ? status_of(answer, asked) : -1;
}

struct mpsd_vault_message mpsd_channel_message(enum mpsd_vault_kind kind)
{
	static atomic_uint sequence;

	return (struct mpsd_vault_message){
		.magic = MPSD_VAULT_MAGIC,
		.version = MPSD_VAULT_VERSION,
		.kind = (uint16_t)kind,
		.sequence = atomic_fetch_add(&sequence, 1) + 1,
	};
}

/* MPSD_VAULT_TOKEN, filled up with zeros: whoever has it comes back from any cgroup. */
static bool greet(int where)
{
	struct mpsd_vault_message hello = mpsd_channel_message(MPSD_VAULT_HELLO), answer;

	memcpy(hello.token, token, sizeof(hello.token));
	return say(where, &hello, -1) && hear(where, &hello, &answer) == MPSD_VAULT_OK;
}

bool mpsd_channel_open(void)
{
	int fd = connect_to_daemon();

	if (fd < 0)
		return false;
	atomic_store(&channel, fd);
	return greet(fd) && mpsd_grant_ask();
}

int mpsd_channel_ask(struct mpsd_vault_message *message, int *fd)
{
	int where = mpsd_channel_path() ? connect_to_daemon() : -1, status = -1, got = -1;
	struct mpsd_vault_message answer;

	if (fd)
		*fd = -1;
	if (where < 0)
		return -1;
	if (greet(where) && say(where, message, -1))
		status = hear_all(where, message, &answer, &got);
	close(where);
	if (status >= 0)
		*message = answer;
	/* A descriptor is there where one is due, and nowhere else. */
	if (status == MPSD_VAULT_OK && fd && got >= 0)
		*fd = got;
	else if (got >= 0)
		close(got);
	return status == MPSD_VAULT_OK && fd && got < 0 ? -1 : status;
}
