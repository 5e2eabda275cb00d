/* SPDX-License-Identifier: MIT */
/* Host memory of the program's that the GPU reaches, and that later copies register. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* Whether any of it lies in [start, end). Any thread's. */
bool mpsd_pins_lie_in(uint64_t start, uint64_t end);
