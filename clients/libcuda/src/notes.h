/* SPDX-License-Identifier: MIT */
/*
 * Writing the ledger (ledger.h). Notes are written under the lock of memory.c, zones and counters under
 * that of zones.c; launches and names by whoever makes them.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ledger.h"

/* Never NULL: where there is no shared memory, and in a forked child, it is memory that nobody reads. */
extern struct mpsd_ledger *mpsd_ledger;

/* Around the writing of a row. ThreadSanitizer knows no fence of C's, but this one. */
static inline void mpsd_row_begin(uint32_t *sequence)
{
	__atomic_store_n(sequence, *sequence + 1, __ATOMIC_RELAXED);
	__sync_synchronize();
}

static inline void mpsd_row_end(uint32_t *sequence)
{
	__atomic_store_n(sequence, *sequence + 1, __ATOMIC_RELEASE);
}

/* Before the first note; only the first call does something. */
void mpsd_ledger_start(void);

/* The memfd, for the daemon; it stays the ledger's. -1: there is none. */
int mpsd_ledger_fd(void);

/* An allocation was made, or freed. */
void mpsd_ledger_born(uint64_t address, uint64_t size, uint32_t device);
void mpsd_ledger_freed(uint64_t address);

/* A row for a zone that has just been laid; -1 where all are taken. */
int mpsd_ledger_zone(uint64_t start, uint64_t size, enum mpsd_zone_kind kind, enum mpsd_zone_role role);
void mpsd_ledger_zone_gone(int row);

/* Since when it lies there, by the driver's clock; for one that takes the place of another there. */
uint64_t mpsd_ledger_zone_born(int row);
void mpsd_ledger_zone_since(int row, uint64_t born_ns);
