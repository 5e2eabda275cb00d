/* SPDX-License-Identifier: MIT */
/* How long what is done again may take. With the lock of mode `exact`, but for what was waited. */
#pragma once

#include <stdint.h>

/* An epoch's first operation, its end, a move into it; and that the program waited for the GPU meanwhile. */
void mpsd_pace_begin(void);
void mpsd_pace_end(uint64_t operations);
void mpsd_pace_leave(void);
void mpsd_pace_waited(uint64_t ns);

/* Of so many operations, in ns; 0: unknown. */
uint64_t mpsd_pace_of(uint64_t operations);
