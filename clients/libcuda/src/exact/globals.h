/* SPDX-License-Identifier: MIT */
/* For validate.c: the variables of modules, before and after one operation, with the order and nothing open. */
#pragma once

#include "exact/state.h"

/* Code of the program that cannot be looked at, or may use the device's heap, so far. */
struct mpsd_globals_count {
	uint64_t unread, heaps;
};

/* What is in the variables that kernels of this operation may reach by their names. */
void mpsd_globals_before(const struct mpsd_op *op);

/* The first variable after `*at` that is not as it was, or NULL; `*at` is 0 at first. */
const char *mpsd_globals_changed(uint64_t *at);

struct mpsd_globals_count mpsd_globals_count(void);
