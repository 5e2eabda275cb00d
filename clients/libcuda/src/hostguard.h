/* SPDX-License-Identifier: MIT */
/*
 * A guard over the program's own host memory, laid from inside, with host_guard_bytes in MPSD_DEBUG (off without): a kernel
 * that is handed a pointer of the host's is absorbed, silently, where it would be fatal for every client of the
 * server. From outside that cannot be done: there nobody sees which memory the program registers, nor where the
 * driver's own mappings will lie (place.h).
 *
 * Sparse ranges over what hostplan.h names, brought up to date every second. What the program registers with the
 * driver is taken out before, so every registration goes as without.
 */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Before the driver's cuInit: reads the environment, and has the driver's mappings placed. */
void mpsd_hostguard_prepare(void);

/* Under the lock of zones.c, as are end, hold, lift and lay: memory in a window, so there is a context. */
void mpsd_hostguard_begin(CUdevice device, const CUuuid *gpu);

/* Under the lock too: how many sparse ranges are laid. They are no mappings of the process. */
uint64_t mpsd_hostguard_ranges(void);

/* The context has gone. Nothing is laid until there is memory in another one. */
void mpsd_hostguard_end(void);

/*
 * For fail-over, in this order: nothing is laid from now on; what was laid was so in the address space of a copy
 * that is used no more; it may be laid again.
 */
void mpsd_hostguard_hold(void);
void mpsd_hostguard_lift(void);
void mpsd_hostguard_lay(void);

/*
 * Around a registration, and around its end: nothing of it is covered from the first call until it is settled that
 * it is not registered. NULL is settled at once.
 */
struct mpsd_spared;
struct mpsd_spared *mpsd_hostguard_spare(const void *base, size_t size);
struct mpsd_spared *mpsd_hostguard_spared(const void *base);
void mpsd_hostguard_settle(struct mpsd_spared *spared, bool is_registered);
