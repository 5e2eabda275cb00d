/* SPDX-License-Identifier: MIT */
/*
 * Room for copies of what was there before (mode `exact`), into which the copy that was left may still write: it is shut
 * until its way there is cut off, too. Behind the fence, for as long as that goes on.
 */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

/* The mover's, before the program goes on: by the copy that was in use after so many moves. */
void mpsd_undoroom_shut(uint64_t moves);

/* Any thread's: that copy comes there no more. Where it is shut for another one it stays so. */
void mpsd_undoroom_open(uint64_t moves);

/* Whether copies may be made there. */
bool mpsd_undoroom_is_open(void);

/* Until it is. AGAIN: a move has begun meanwhile; OUT_OF_MEMORY: it is not to be had for 2 s, or the program ends. */
CUresult mpsd_undoroom_await(void);

/* The program ends: nothing is waited for any more. */
void mpsd_undoroom_leave_off(void);
bool mpsd_undoroom_is_left_off(void);
void mpsd_undoroom_child(void);
