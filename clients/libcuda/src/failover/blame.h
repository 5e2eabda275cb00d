/* SPDX-License-Identifier: MIT */
/* Whose code had the exception from which a domain was lost, as far as a lost copy of the driver can tell. */
#pragma once

#include <stdbool.h>

#include "failoverwire.h"

/* In a forked child. */
void mpsd_blame_child(void);

/* All from here on for the thread of line.c. */

/* Ask the driver what is needed later, when nothing may be asked of it. */
void mpsd_blame_prepare(void);

/*
 * Look at what the lost copy's context had: for a moment, and beside what goes on then. Calls are held, and the copy
 * asks nothing for itself any more. The SMs are read only if an SM exception `was_logged`: else they keep nothing, and
 * each program that reads them delays the others.
 */
void mpsd_blame_begin(unsigned int number, bool was_logged);

/* What was found; who looks for longer than that is worth has found nothing. `hurries`: a look under way is not waited for. */
enum mpsd_failover_whose mpsd_blame_end(bool hurries);

/* What the daemon knows of it: 0: not the word, 1: not NO_SIGN, 2: all. */
void mpsd_blame_may_tell(unsigned int what);
bool mpsd_blame_is_told(void);
