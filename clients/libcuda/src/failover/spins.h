/* SPDX-License-Identifier: MIT */
/* How those wait in a move whom the program waits for: looking again and again, where nobody else needs their processor. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define MPSD_FENCE_LOOK_NS 30000

/* Whether one thread may spin beside those that it waits for; and the mover, beside one that does. */
bool mpsd_fence_spins(void);
bool mpsd_fence_spins_too(void);

/* Between two looks at what began then, by who is waited for if it `spins`. */
void mpsd_fence_rest(uint64_t began, bool spins);
