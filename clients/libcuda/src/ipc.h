/* SPDX-License-Identifier: MIT */
/* Pieces of other processes, opened with cuIpcOpenMemHandle: what memory.c has to know of them. */
#pragma once

#include <stdbool.h>

#include "memory.h"

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
