// SPDX-License-Identifier: MIT
/*
 * Legacy IPC of memory in the window, for the process that has it: the driver has none for mapped memory,
 * so the daemon's vault hands the piece's descriptor over. A handle names the piece by a secret that is
 * told to the vault (MPSD_VAULT_SHARE), one for each piece, made when it is first asked for.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "channel.h"
#include "failover/pools.h"
#include "ipc.h"
#include "marks.h"
#include "proxy.h"
#include "stats.h"
#include "vault.h"

/* For the vault to get what waits before it. An answer has the limit of channel.c. */
#define REACH_MS 5000

struct secret {
	struct secret *next;
	CUdeviceptr piece;
	uint8_t token[MPSD_VAULT_TOKEN_ROOM];
};

/* Held around an export: two threads with one piece get one secret. */
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
/* The list. Taken with memory.c's lock held too; nothing is called while it is held. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct secret *secrets;

static struct secret **secret_of(CUdeviceptr piece)
{
	struct secret **link = &secrets;

	while (*link && (*link)->piece != piece)
		link = &(*link)->next;
	return link;
}

void mpsd_share_forget(CUdeviceptr piece)
{
	struct secret **link, *secret;

	if (!__atomic_load_n(&secrets, __ATOMIC_ACQUIRE))
		return;
	pthread_mutex_lock(&lock);
	link = secret_of(piece);
	secret = *link;
	if (secret)
		__atomic_store_n(link, secret->next, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
	free(secret);
}

bool mpsd_share_is_own(const uint8_t *token)
{
	const struct secret *secret;
	bool is;

	pthread_mutex_lock(&lock);
	secret = secrets;
	while (secret && memcmp(secret->token, token, sizeof(secret->token)))
		secret = secret->next;
	is = secret != NULL;
	pthread_mutex_unlock(&lock);
	return is;
}

static bool known(CUdeviceptr piece, uint8_t *token)
{
	const struct secret *secret;
	bool is;

	pthread_mutex_lock(&lock);
	secret = *secret_of(piece);
	is = secret != NULL;
	if (is)
		memcpy(token, secret->token, sizeof(secret->token));
	pthread_mutex_unlock(&lock);
	return is;
}

static bool remember(CUdeviceptr piece, const uint8_t *token)
{
	struct secret *secret = calloc(1, sizeof(*secret));

	if (!secret)
		return false;
	secret->piece = piece;
	memcpy(secret->token, token, sizeof(secret->token));
	pthread_mutex_lock(&lock);
	secret->next = secrets;
	__atomic_store_n(&secrets, secret, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
	return true;
}

static bool make_secret(uint8_t *token)
{
	ssize_t got;

	do
		got = getrandom(token, MPSD_VAULT_TOKEN_ROOM, 0);
	while (got < 0 && errno == EINTR);
	return got == MPSD_VAULT_TOKEN_ROOM;
}

/* The secret of a piece: the same one while the piece lives. */
static bool share(CUdeviceptr piece, uint8_t *token)
{
	struct mpsd_vault_message message = mpsd_channel_message(MPSD_VAULT_SHARE);

	if (known(piece, token))
		return true;
	if (!mpsd_vault_await(piece, REACH_MS) || !make_secret(token))
		return false;
	message.number = piece;
	memcpy(message.token, token, sizeof(message.token));
	return mpsd_channel_ask(&message, NULL) == MPSD_VAULT_OK && remember(piece, token);
}

CUresult mpsd_ipc_failed(void)
{
	static bool said;

	mpsd_count(ipc_failed);
	if (!__atomic_exchange_n(&said, true, __ATOMIC_RELAXED))
		mpsd_say("legacy IPC of vaulted memory failed: the vault (MPSD_VAULT_SOCKET) does not answer, "
			 "does not have that memory (a quota), or its owner is another user or has ended");
	return CUDA_ERROR_MAP_FAILED;
}

CUresult wrap_cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr)
{
	struct mpsd_ipc_handle handle = { 0 };
	struct mpsd_allocation allocation;
	struct mpsd_pool_answer pool;
	CUdevice device;
	bool done;

	if (!pHandle || real_cuCtxGetDevice(&device) != CUDA_SUCCESS || !mpsd_memory_find(dptr, &allocation))
		return real_cuIpcGetMemHandle(pHandle, dptr);
	/* The driver shares no memory of a pool so. */
	if (allocation.is_imported || mpsd_pools_look(allocation.base, &pool))
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(handle.magic, MPSD_IPC_MAGIC, sizeof(handle.magic));
	handle.offset = allocation.base - allocation.piece;
	handle.size = allocation.size;
	handle.id = mpsd_mark_id(allocation.base);
	pthread_mutex_lock(&turn);
	done = handle.id && share(allocation.piece, handle.token);
	pthread_mutex_unlock(&turn);
	if (!done)
		return mpsd_ipc_failed();
	mpsd_count(ipc_shared);
	memcpy(pHandle, &handle, sizeof(handle));
	return CUDA_SUCCESS;
}
