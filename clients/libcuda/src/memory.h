/* SPDX-License-Identifier: MIT */
#pragma once

#include <stdbool.h>

/* Whether the wrappers of memory.c are to be put into the table. */
bool mpsd_memory_wanted(void);
