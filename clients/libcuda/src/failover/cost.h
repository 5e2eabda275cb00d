/* SPDX-License-Identifier: MIT */
/* What a standby takes of the GPU's memory. */
#pragma once

#include <stdatomic.h>

#include "failover/made.h"

/* All for the thread of line.c, but where it says otherwise. */

/* What is free on the GPU of this context of the program's, in bytes, by the copy in use; 0: nobody knows. */
uint64_t mpsd_cost_free(const struct mpsd_made *context);

/* Its context in the standby was made since so many were free. */
void mpsd_cost_took(const struct mpsd_made *context, uint64_t before);

/* What the contexts there take; 0: nobody knows. From any thread. */
uint64_t mpsd_cost_bytes(void);

/* Something there could not be made for lack of memory. */
extern atomic_bool mpsd_cost_was_short;

/* Whether there is memory for a standby, and some to spare; where that is not known, there is. */
bool mpsd_cost_is_there(void);
