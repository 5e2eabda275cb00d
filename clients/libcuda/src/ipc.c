// SPDX-License-Identifier: MIT
/*
 * Legacy IPC for memory in the window: the driver has none for mapped memory, so the daemon's vault
 * hands the piece's descriptor over. A handle names a piece by a secret that its exporter told the vault
 * (MPSD_VAULT_SHARE); whoever shows that to the vault, and has the same owner, gets the descriptor and
 * maps the whole piece into its own window, as the driver's IPC maps the whole block that an allocation
 * lies in.
 *
 * Handles that are not of this kind are the driver's. None of this is on the path of a launch.
 */
#include "ipc.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "channel.h"
#include "marks.h"
#include "proxy.h"
#include "stats.h"
#include "vault.h"

/* For the vault to get what waits before it. An answer has the limit of channel.c. */
#define REACH_MS 5000

#define MAGIC "mpsd-ipc"

struct handle {
	char magic[8];
	uint8_t token[MPSD_VAULT_TOKEN_ROOM];
	uint64_t offset, size;		/* of the allocation in its piece */
	uint64_t id;			/* of the allocation: what takes its place later has another handle */
};

_Static_assert(sizeof(struct handle) == sizeof(CUipcMemHandle), "a handle is as long as the driver's");

struct piece {
	struct piece *next;
	uint8_t token[MPSD_VAULT_TOKEN_ROOM];
	CUdevice device;		/* in whose window it lies */
	CUdeviceptr base;
	size_t size;
	struct opened *opened;
};

/* A handle that is open. `references`: how often. */
struct opened {
	struct opened *next;
	uint64_t id;
	CUdeviceptr address;
	size_t size;
	unsigned int references;
};

/* Held around an open, a close, an export and the end of a context: two threads with one handle get one mapping. */
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
/* The list. Taken with, and without, memory.c's lock held; nothing is called while it is held. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct piece *pieces;

/* What memory.c asks */

static struct piece **piece_at(CUdeviceptr address)
{
	struct piece **link = &pieces;

	while (*link && address - (*link)->base >= (*link)->size)
		link = &(*link)->next;
	return link;
}

bool mpsd_ipc_is_at(CUdeviceptr base)
{
	bool is;

	if (!__atomic_load_n(&pieces, __ATOMIC_ACQUIRE))
		return false;
	pthread_mutex_lock(&lock);
	is = *piece_at(base) != NULL;
	pthread_mutex_unlock(&lock);
	return is;
}

bool mpsd_ipc_narrow(struct mpsd_allocation *allocation, CUdeviceptr address)
{
	struct opened *opened = NULL;
	struct piece *piece;

	pthread_mutex_lock(&lock);
	piece = *piece_at(address);
	if (piece)
		opened = piece->opened;
	while (opened && address - opened->address >= opened->size)
		opened = opened->next;
	if (opened) {
		allocation->base = opened->address;
		allocation->size = opened->size;
	}
	pthread_mutex_unlock(&lock);
	return opened != NULL;
}

void mpsd_ipc_hold(void)
{
	pthread_mutex_lock(&turn);
}

void mpsd_ipc_resume(void)
{
	pthread_mutex_unlock(&turn);
}

static void let_go(struct piece *piece)
{
	while (piece->opened) {
		struct opened *opened = piece->opened;

		piece->opened = opened->next;
		free(opened);
		__atomic_fetch_sub(&mpsd_stats->ipc_opened, 1, __ATOMIC_RELAXED);
	}
	free(piece);
}

bool mpsd_ipc_forget(CUdeviceptr base)
{
	struct piece **link, *piece;

	pthread_mutex_lock(&lock);
	link = piece_at(base);
	piece = *link;
	if (piece)
		__atomic_store_n(link, piece->next, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
	if (piece)
		let_go(piece);
	return piece != NULL;
}

/* Exporting */

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

	if (!mpsd_vault_await(piece, REACH_MS))
		return false;
	if (mpsd_vault_share_of(piece, token))
		return true;
	if (!make_secret(token))
		return false;
	message.number = piece;
	memcpy(message.token, token, sizeof(message.token));
	return mpsd_channel_ask(&message, NULL) == MPSD_VAULT_OK && mpsd_vault_note_share(piece, token);
}

static CUresult failed(void)
{
	static bool said;

	mpsd_count(ipc_failed);
	if (!__atomic_exchange_n(&said, true, __ATOMIC_RELAXED))
		mpsd_say("legacy IPC of vaulted memory failed: the vault (MPSD_VAULT_SOCKET) does not answer, "
			 "has not got that memory (a quota), or its owner is another or has ended");
	return CUDA_ERROR_MAP_FAILED;
}

CUresult wrap_cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr)
{
	struct handle handle = { .magic = MAGIC };
	struct mpsd_allocation allocation;
	CUdevice device;
	bool done;

	if (!pHandle || real_cuCtxGetDevice(&device) != CUDA_SUCCESS || !mpsd_memory_find(dptr, &allocation))
		return real_cuIpcGetMemHandle(pHandle, dptr);
	if (allocation.is_imported)
		return CUDA_ERROR_INVALID_VALUE;
	handle.offset = allocation.base - allocation.piece;
	handle.size = allocation.size;
	handle.id = mpsd_mark_id(allocation.base);
	pthread_mutex_lock(&turn);
	done = handle.id && share(allocation.piece, handle.token);
	pthread_mutex_unlock(&turn);
	if (!done)
		return failed();
	mpsd_count(ipc_shared);
	memcpy(pHandle, &handle, sizeof(handle));
	return CUDA_SUCCESS;
}

/* Opening, with the turn held */

static struct piece *find_piece(const struct handle *handle, CUdevice device)
{
	struct piece *piece = pieces;

	while (piece && (piece->device != device || memcmp(piece->token, handle->token, sizeof(piece->token))))
		piece = piece->next;
	return piece;
}

/* Ask the vault for the piece, and map it. */
static CUresult fetch(const struct handle *handle, struct piece *piece)
{
	struct mpsd_vault_message message = mpsd_channel_message(MPSD_VAULT_OPEN);
	CUmemGenericAllocationHandle memory;
	CUresult result;
	int fd;

	memcpy(message.token, handle->token, sizeof(message.token));
	if (mpsd_channel_ask(&message, &fd) != MPSD_VAULT_OK)
		return failed();
	result = real_cuMemImportFromShareableHandle(&memory, (void *)(uintptr_t)fd,
						     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	close(fd);
	if (result != CUDA_SUCCESS)
		return failed();
	piece->size = message.size;
	result = mpsd_memory_adopt(piece->device, piece->size, memory, &piece->base);
	real_cuMemRelease(memory);
	return result == CUDA_ERROR_NOT_SUPPORTED ? failed() : result;
}

static CUresult new_piece(const struct handle *handle, CUdevice device, struct piece **answer)
{
	struct piece *piece = calloc(1, sizeof(*piece));
	CUresult result;

	if (!piece)
		return CUDA_ERROR_OUT_OF_MEMORY;
	memcpy(piece->token, handle->token, sizeof(piece->token));
	piece->device = device;
	result = fetch(handle, piece);
	if (result != CUDA_SUCCESS) {
		free(piece);
		return result;
	}
	pthread_mutex_lock(&lock);
	piece->next = pieces;
	__atomic_store_n(&pieces, piece, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
	*answer = piece;
	return CUDA_SUCCESS;
}

static struct opened *find_opened(struct piece *piece, const struct handle *handle)
{
	struct opened *opened = piece->opened;

	while (opened && (opened->id != handle->id || opened->address != piece->base + handle->offset))
		opened = opened->next;
	return opened;
}

static CUresult open_in(struct piece *piece, const struct handle *handle, CUdeviceptr *address)
{
	struct opened *opened = find_opened(piece, handle);

	if (handle->offset > piece->size || !handle->size || handle->size > piece->size - handle->offset)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!opened) {
		opened = calloc(1, sizeof(*opened));
		if (!opened)
			return CUDA_ERROR_OUT_OF_MEMORY;
		opened->id = handle->id;
		opened->address = piece->base + handle->offset;
		opened->size = handle->size;
		pthread_mutex_lock(&lock);
		opened->next = piece->opened;
		piece->opened = opened;
		pthread_mutex_unlock(&lock);
		mpsd_count(ipc_opened);
	}
	opened->references++;
	*address = opened->address;
	return CUDA_SUCCESS;
}

/* Nothing of it is open (any more). */
static void close_piece(struct piece *piece)
{
	CUdeviceptr base = piece->base;

	if (mpsd_ipc_forget(base))
		mpsd_memory_disown(base);
}

static CUresult open_handle(CUdeviceptr *pdptr, const struct handle *handle, unsigned int flags)
{
	struct piece *piece;
	CUresult result;
	CUdevice device;

	if (!pdptr || flags & ~(unsigned int)CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
		return CUDA_ERROR_INVALID_VALUE;
	result = real_cuCtxGetDevice(&device);
	if (result != CUDA_SUCCESS)
		return result;
	/* As the driver has it: a handle is for other processes. */
	if (mpsd_vault_is_own_share(handle->token))
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&turn);
	piece = find_piece(handle, device);
	if (!piece)
		result = new_piece(handle, device, &piece);
	if (result == CUDA_SUCCESS)
		result = open_in(piece, handle, pdptr);
	if (piece && !piece->opened)
		close_piece(piece);
	pthread_mutex_unlock(&turn);
	return result;
}

static bool is_ours(const CUipcMemHandle *given, struct handle *handle)
{
	memcpy(handle, given, sizeof(*handle));
	return !memcmp(handle->magic, MAGIC, sizeof(handle->magic));
}

CUresult wrap_cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
{
	struct handle ours;

	if (!is_ours(&handle, &ours))
		return real_cuIpcOpenMemHandle_v2(pdptr, handle, Flags);
	return open_handle(pdptr, &ours, Flags);
}

#undef cuIpcOpenMemHandle
CUresult wrap_cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
{
	struct handle ours;

	if (!is_ours(&handle, &ours))
		return real_cuIpcOpenMemHandle(pdptr, handle, Flags);
	return open_handle(pdptr, &ours, Flags);
}

/* Closing */

/* The handle that is open at just that address, of which several may be (an allocation and what took its place). */
static struct opened **opened_at(CUdeviceptr address, struct piece **piece)
{
	struct opened **link;

	*piece = *piece_at(address);
	if (!*piece)
		return NULL;
	link = &(*piece)->opened;
	while (*link && (*link)->address != address)
		link = &(*link)->next;
	return *link ? link : NULL;
}

/* With the turn held. `last`: in case it is the last reference, it may go. False: it is, and may not. */
static bool close_once(CUdeviceptr address, bool last)
{
	struct opened **link, *opened;
	struct piece *piece;

	link = opened_at(address, &piece);
	if (!link)
		return true;
	if ((*link)->references > 1) {
		(*link)->references--;
		return true;
	}
	if (!last)
		return false;
	pthread_mutex_lock(&lock);
	opened = *link;
	*link = opened->next;
	pthread_mutex_unlock(&lock);
	free(opened);
	__atomic_fetch_sub(&mpsd_stats->ipc_opened, 1, __ATOMIC_RELAXED);
	if (!piece->opened)
		close_piece(piece);
	return true;
}

/*
 * The wait for running work comes before the last one goes, and without the turn: the work may need
 * what another thread opens to end.
 */
CUresult wrap_cuIpcCloseMemHandle(CUdeviceptr dptr)
{
	struct mpsd_allocation allocation;
	CUresult result;
	CUdevice device;
	bool done;

	if (real_cuCtxGetDevice(&device) != CUDA_SUCCESS || !mpsd_memory_find(dptr, &allocation) ||
	    !allocation.is_imported)
		return real_cuIpcCloseMemHandle(dptr);
	if (allocation.base != dptr)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&turn);
	done = close_once(dptr, false);
	pthread_mutex_unlock(&turn);
	if (done)
		return CUDA_SUCCESS;
	result = mpsd_memory_wait(allocation.owner);
	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&turn);
	close_once(dptr, true);
	pthread_mutex_unlock(&turn);
	return CUDA_SUCCESS;
}
