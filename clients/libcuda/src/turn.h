/* SPDX-License-Identifier: MIT */
/*
 * One at a time calls the driver about physical memory: the program's thread, that takes and gives it back, or
 * the channel's, that exports it and lets go of its handle. Driver 580 frees twice what cuMemUnmap and
 * cuMemRelease of one handle meet at.
 */
#pragma once

#include <stdbool.h>

/* False: the program is ending, or this is a forked child, where nobody else calls the driver any more. */
bool mpsd_turn_take(void);

/* `taken` is what take answered. */
void mpsd_turn_give(bool taken);

/* At the program's end: nobody waits for a turn from now on, and none is given. A call that lasts is not waited for. */
void mpsd_turn_keep(void);

/* In a forked child, where somebody of the parent's may have had it. */
void mpsd_turn_forget(void);
