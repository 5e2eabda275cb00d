/* SPDX-License-Identifier: MIT */
/*
 * The one descriptor that is exported at a time, by the thread that brings memory to the daemon. Its number is
 * where a forked child finds it, to close what it inherited.
 */
#pragma once

#include <cuda.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "vaultwire.h"

/*
 * Fills in the message's GPU. Nothing where the driver will not, or the program is `off`. The handle is of what
 * is mapped at `base`, in the copy of the driver that was in use after so many `moves` (failover/carry.h).
 */
bool mpsd_export(CUdevice device, CUmemGenericAllocationHandle handle, uint64_t moves, uint64_t base,
		 const atomic_bool *off, struct mpsd_vault_message *message);

int mpsd_exported(void);	/* -1: none */
void mpsd_export_close(void);
