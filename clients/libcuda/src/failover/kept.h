/* SPDX-License-Identifier: MIT */
/*
 * A descriptor of each piece of memory that has been mirrored, or is to be, for what was imported into a copy of the
 * driver cannot be exported from it again. All with the lock of the windows.
 */
#pragma once

#include <cuda.h>
#include <stdbool.h>

/* -1: there is none. It stays this table's. */
int mpsd_kept_find(CUdeviceptr base);

/* The same descriptor where those of the program hardly are, in place of this one. -1: there are no more. */
int mpsd_kept_high(int fd);

/* Takes the descriptor over. Where there is no room for it in the process it is closed. */
bool mpsd_kept_add(CUdeviceptr base, int fd);

/* In a forked child, which has none of them: memory lasts as long as the last descriptor. */
void mpsd_kept_child(void);

/* The piece is gone. */
void mpsd_kept_drop(CUdeviceptr base);
