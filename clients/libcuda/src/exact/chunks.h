/* SPDX-License-Identifier: MIT */
/* Room for copies of what was there before the epoch. */
#pragma once

#include "exact/state.h"

/* With the lock: for `size`, or as much of it as lies in one chunk; 0: none is left. */
CUdeviceptr mpsd_chunk_take(uint64_t size, uint64_t *got);
void mpsd_chunks_empty(void);

/*
 * From the thread of line.c, at any time: buffers that no epoch has needed for a while are released, for other programs share
 * that memory. Until when that has nothing to do: -1: for ever.
 */
void mpsd_chunks_tend(void);
int mpsd_chunks_due_ms(void);

/* Beyond so many bytes the buffers are released. */
uint64_t mpsd_chunks_needed(void);

/* Without it, with the order. OUT_OF_MEMORY: there is no more. */
CUresult mpsd_chunk_more(uint64_t size);
bool mpsd_chunk_is(CUdeviceptr address);

/* In a move, with the lock: whether a save that is not proven lies in room that the fence did not wait for. */
bool mpsd_chunks_are_open(void);
