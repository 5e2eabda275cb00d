/* SPDX-License-Identifier: MIT */
/*
 * The limit of this program's snapshot buffers, which the daemon grants (LIMIT in failoverwire.h): all programs on a GPU share
 * a part of its memory. Until the daemon has named one there is none, and chunks.c goes by the GPU's memory alone.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include <cuda.h>

#define MPSD_NO_LIMIT UINT64_MAX

uint64_t mpsd_limit(void);

/* Ask the daemon for snapshot buffers of so many bytes in all, and do not wait for the answer. */
void mpsd_limit_want(uint64_t bytes);

/* With the order: wait a moment for the answer. A daemon that is there needs a millisecond. AGAIN: a move has come between. */
CUresult mpsd_limit_await(void);

/*
 * With the order: one operation needs so many bytes of snapshots, more than the limit. True: the daemon has not answered yet, so
 * this says nothing about the next epochs.
 */
bool mpsd_limit_missed(uint64_t needs, bool may_come_back);

/* With the lock, at the end of an epoch: the program may leave. */
void mpsd_limit_end(void);

/*
 * From the thread of line.c: the daemon's limit, NO_LIMIT if it has none, and the request that this answers, or 0; the request
 * that is not answered yet, or 0.
 */
void mpsd_limit_told(uint64_t bytes, uint64_t wish);
uint64_t mpsd_limit_wanted(void);

/* By it, too: whether there is a daemon that answers. */
void mpsd_limit_answers(bool is);
