/* SPDX-License-Identifier: MIT */
/* Which kernels are in flight, as far as it costs a launch next to nothing to know. */
#pragma once

#include <cuda.h>

/* A context came to be, or ended. While there is only one, a wait for it is a wait for everything. */
void mpsd_launches_context(CUcontext context);
void mpsd_launches_no_context(CUcontext context);

/* A launch by the function of that index has come: what its way to the driver looks at is on its way here. */
void mpsd_launches_fetch(unsigned int index);
void mpsd_launches_fetch_row(void);	/* once the other has arrived */

struct mpsd_ledger;

/* From now on the ledger is `to`, which nobody reads yet; what is known of names and launches comes along. */
void mpsd_launches_move(struct mpsd_ledger *to);
