/* SPDX-License-Identifier: MIT */
/* What a standby takes of the GPU's memory. */
#pragma once

#include <stdatomic.h>

#include "failover/made.h"

/* What is free on the GPU of this context of the program's, in bytes, by the copy in use; 0: nobody knows. */
uint64_t mpsd_cost_free(const struct mpsd_made *context, uint64_t *total);

/* Its context in the standby was made meanwhile. */
void mpsd_cost_took(const struct mpsd_made *context, uint64_t before);

/* What the contexts there take; 0: nobody knows. */
uint64_t mpsd_cost_bytes(void);

/* Something there could not be made for lack of memory. */
extern atomic_bool mpsd_cost_was_short;

/* For the thread: whether there is memory for a standby, and some to spare. Where one went for its memory before. */
bool mpsd_cost_is_there(void);
