/* SPDX-License-Identifier: MIT */
/*
 * Bringing memory to the daemon's vault, off the program's path: everything here is a note for one
 * thread, which is started with the first one. The daemon may be slow or absent; nobody waits for it.
 */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether the environment names a vault (MPSD_VAULT_SOCKET). */
bool mpsd_vault_offered(void);

/*
 * Bring what is mapped at `base`. True: the handle is the vault's side's now, which releases it.
 * False, and counted, where there is no vault or too much waits for it already.
 */
bool mpsd_vault_put(uint64_t base, size_t size, CUdevice device, CUmemGenericAllocationHandle handle);

/* What was brought as `base` is no longer the program's. Before it is unmapped. */
void mpsd_vault_drop(uint64_t base);

/* Wait until the daemon has what was brought as `base`. False where it did not take it, or not in time. */
bool mpsd_vault_await(uint64_t base, int milliseconds);

/*
 * Wait until the daemon has let go of what was dropped, for a quarter of a second at most. False where
 * there was nothing to wait for. Only for when memory has run out.
 */
bool mpsd_vault_settle(void);
