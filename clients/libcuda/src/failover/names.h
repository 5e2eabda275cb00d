/* SPDX-License-Identifier: MIT */
/* The tables in which records are found, for who adds and ends them (records.c): under the records' lock. */
#pragma once

#include "failover/made.h"

/* By its name, where it has one, and by what the copy in use calls it. */
void mpsd_names_enter(struct mpsd_made *made);
void mpsd_names_strike(struct mpsd_made *made);

/* How many moves were before the copy whose handles these are. */
uint64_t mpsd_names_moves(void);

/* NULL: nothing is called so by the copy in use. */
struct mpsd_made *mpsd_names_native(const void *native);
