/* SPDX-License-Identifier: MIT */
/*
 * What the thread of line.c hears and says of budgets, and of a program that has left: HOLDS, COST, LEAVES, EXPOSED, LIMIT
 * (failoverwire.h).
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "failoverwire.h"

/* WELCOME has come on that connection; the connection has ended. */
void mpsd_budgets_welcome(int line, const struct mpsd_failover_message *welcome);
void mpsd_budgets_line_ended(void);

/* LIMIT */
void mpsd_budgets_limit(const struct mpsd_failover_message *limit);

/* What there is to say. False: the connection has ended. */
bool mpsd_budgets_tell(void);

/* When there may be something to say that no thread wakes this one for; -1: nothing. */
int mpsd_budgets_due_ms(void);

/* The program has left, and a daemon that does not know LEAVES offers a standby domain. False: as above. */
bool mpsd_budgets_refuse(int line, uint64_t generation);
