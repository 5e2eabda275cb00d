/* SPDX-License-Identifier: MIT */
/* For validate.c: the variables of modules, before and after one operation, with the order and nothing open. */
#pragma once

#include "exact/state.h"

/* What is in the variables that kernels of this operation may reach by their names. */
void mpsd_globals_before(const struct mpsd_op *op);

/* The first variable after `*at` that is not as it was, or NULL; `*at` is 0 at first. */
const char *mpsd_globals_changed(uint64_t *at);

/* How many images of code could not be looked at, or may use the device's heap, so far. */
uint64_t mpsd_globals_unknown(void);
