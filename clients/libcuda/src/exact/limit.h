/* SPDX-License-Identifier: MIT */
/*
 * The limit of this program's snapshot buffers, which the daemon grants (LIMIT in failoverwire.h): all programs on a GPU share
 * a part of its memory. Until the daemon has named one there is none, and chunks.c goes by the GPU's memory alone.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define MPSD_NO_LIMIT UINT64_MAX

uint64_t mpsd_limit(void);

/* Snapshot buffers of so many bytes in all are wanted. The daemon is asked, and nobody waits for its answer. */
void mpsd_limit_want(uint64_t bytes);

/*
 * With the order: an operation needs so many bytes of snapshots, more than the limit. True: the epoch is unsure for now alone,
 * for the daemon has not answered yet.
 */
bool mpsd_limit_missed(uint64_t needs, bool may_come_back);

/* With the lock, at the end of an epoch: the program may leave. */
void mpsd_limit_end(void);

/* From the thread of line.c: what the daemon says; NO_LIMIT: it says nothing of that. What is wanted and not answered yet; 0: nothing. */
void mpsd_limit_told(uint64_t bytes);
uint64_t mpsd_limit_wanted(void);
