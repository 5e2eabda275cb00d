/* SPDX-License-Identifier: MIT */
/*
 * Names that the driver could never give: what is made after a move may get the address of an old handle. With the lock
 * of held.c.
 */
#pragma once

#include <stdbool.h>

bool mpsd_spare_is(const void *name);

/* NULL: all are somebody's. Those that were given back come last, for who has one may still have that. */
void *mpsd_spare_take(void);

/* Of another name nothing. */
void mpsd_spare_give(const void *name);
