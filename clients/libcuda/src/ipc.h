/* SPDX-License-Identifier: MIT */
/*
 * Legacy IPC of memory in a window. share.c: pieces of this process, for others; ipc.c: pieces of others,
 * opened with cuIpcOpenMemHandle, and what memory.c has to know of them.
 */
#pragma once

#include <stdbool.h>

#include "memory.h"
#include "vaultwire.h"

#define MPSD_IPC_MAGIC "mpsd-ipc"

/* What the 64 bytes are of a handle for memory in a window. */
struct mpsd_ipc_handle {
	char magic[8];		/* without a final zero */
	uint8_t token[MPSD_VAULT_TOKEN_ROOM];	/* the secret that the piece is shared under */
	uint64_t offset, size;			/* of the allocation in its piece */
	uint64_t id;				/* of the allocation: what takes its place later has another */
};

_Static_assert(sizeof(struct mpsd_ipc_handle) == sizeof(CUipcMemHandle), "a handle is as long as the driver's");

/* Counts it, says it once, and gives the error. */
CUresult mpsd_ipc_failed(void);

/*
 * `allocation` is a whole piece that was opened: leaves of it what the handle that was opened for `address`
 * stood for. False where none was.
 */
bool mpsd_ipc_narrow(struct mpsd_allocation *allocation, CUdeviceptr address);

/* Whether a piece of another process lies at `base`. */
bool mpsd_ipc_is_at(CUdeviceptr base);

/* Around the end of a context, before memory.c's lock is taken: nothing is opened or closed meanwhile. */
void mpsd_ipc_hold(void);
void mpsd_ipc_resume(void);

/* Its context has ended: forget it. Whether there was one. */
bool mpsd_ipc_forget(CUdeviceptr base);

/* The piece is no longer this process's: its secret is void. */
void mpsd_share_forget(CUdeviceptr piece);

/* Whether a piece of this process is shared under that secret. */
bool mpsd_share_is_own(const uint8_t *token);
