/* SPDX-License-Identifier: MIT */
#pragma once

#include <cuda.h>
#include <stdbool.h>

/* By one thread, when the program wishes to be exact. */
void mpsd_named_start(void);

/* Whether there are any. */
extern bool mpsd_named_any;

/* Before a launch of it. */
void mpsd_named_look(CUfunction function);

/* What the driver calls it; NULL: nobody knows. */
const char *mpsd_name_of_function(CUfunction function);
