/* SPDX-License-Identifier: MIT */
/* Whether what operations write is what was saved before them (MPSD_FAILOVER=validate). */
#pragma once

#include "exact/state.h"

void mpsd_validate_start(void);	/* by one thread, when the program wishes to be exact */
bool mpsd_validates(void);
void mpsd_validate_end(const char *why);	/* with what is not looked at any more */
void mpsd_validate_report(void);		/* at the program's end */

/* Around one operation, with the order, and nothing open. The saves of the operation are those of its epoch. */
void mpsd_validate_before(const struct mpsd_op *op);
void mpsd_validate_after(const struct mpsd_op *op);
