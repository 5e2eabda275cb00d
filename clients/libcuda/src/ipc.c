// SPDX-License-Identifier: MIT
/*
 * Opening what another process has shared (share.c): whoever shows its secret to the vault, and has the
 * same owner, gets the piece's descriptor and maps the whole piece into its own window, as the driver's
 * IPC maps the whole block that an allocation lies in.
 *
 * Handles that are not of this kind are the driver's. None of this is on the path of a launch.
 */
#include "ipc.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "channel.h"
#include "marks.h"
#include "proxy.h"
#include "stats.h"

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

/* Held around an open, a close and the end of a context: two threads with one handle get one mapping. */
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
		mpsd_mark_forget(opened->address);
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

/* Opening, with the turn held */

static struct piece *find_piece(const struct mpsd_ipc_handle *handle, CUdevice device)
{
	struct piece *piece = pieces;

	while (piece && (piece->device != device || memcmp(piece->token, handle->token, sizeof(piece->token))))
		piece = piece->next;
	return piece;
}

/* Ask the vault for the piece, and map it. */
static CUresult fetch(const struct mpsd_ipc_handle *handle, struct piece *piece)
{
	struct mpsd_vault_message message = mpsd_channel_message(MPSD_VAULT_OPEN);
	CUmemGenericAllocationHandle memory;
	CUresult result;
	int fd;

	memcpy(message.token, handle->token, sizeof(message.token));
	if (mpsd_channel_ask(&message, &fd) != MPSD_VAULT_OK)
		return mpsd_ipc_failed();
	result = real_cuMemImportFromShareableHandle(&memory, (void *)(uintptr_t)fd,
						     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	close(fd);
	if (result != CUDA_SUCCESS)
		return mpsd_ipc_failed();
	piece->size = message.size;
	result = mpsd_memory_adopt(piece->device, piece->size, memory, &piece->base);
	real_cuMemRelease(memory);
	return result == CUDA_ERROR_NOT_SUPPORTED ? mpsd_ipc_failed() : result;
}

static CUresult new_piece(const struct mpsd_ipc_handle *handle, CUdevice device, struct piece **answer)
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

static struct opened *find_opened(struct piece *piece, const struct mpsd_ipc_handle *handle)
{
	struct opened *opened = piece->opened;

	while (opened && (opened->id != handle->id || opened->address != piece->base + handle->offset))
		opened = opened->next;
	return opened;
}

static CUresult open_in(struct piece *piece, const struct mpsd_ipc_handle *handle, CUdeviceptr *address)
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

static CUresult open_handle(CUdeviceptr *pdptr, const struct mpsd_ipc_handle *handle, unsigned int flags)
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
	if (mpsd_share_is_own(handle->token))
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

static bool is_ours(const CUipcMemHandle *given, struct mpsd_ipc_handle *handle)
{
	memcpy(handle, given, sizeof(*handle));
	return !memcmp(handle->magic, MPSD_IPC_MAGIC, sizeof(handle->magic));
}

CUresult wrap_cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
{
	struct mpsd_ipc_handle ours;

	if (!is_ours(&handle, &ours))
		return real_cuIpcOpenMemHandle_v2(pdptr, handle, Flags);
	return open_handle(pdptr, &ours, Flags);
}

#undef cuIpcOpenMemHandle
CUresult wrap_cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
{
	struct mpsd_ipc_handle ours;

	if (!is_ours(&handle, &ours))
		return real_cuIpcOpenMemHandle(pdptr, handle, Flags);
	return open_handle(pdptr, &ours, Flags);
}

/* Closing */

/* What is open at just that address: one of several, where an allocation and what took its place are. */
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
	/* What was allocated in its place may be open there, too. */
	if (!opened_at(address, &piece))
		mpsd_mark_forget(address);
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
