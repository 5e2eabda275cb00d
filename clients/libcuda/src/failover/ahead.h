/* SPDX-License-Identifier: MIT */
/* What is made in the standby though it could be made there when it is needed: executable graphs. */
#pragma once

#include "failover/made.h"

/* For the thread of line.c, not in a move: one of them. False: there is none to be made. */
bool mpsd_ahead_make(void);

/* All under the lock of made.h. The program has changed what the record is of; has ended it; the standby has gone. */
void mpsd_ahead_changed(struct mpsd_made *made);
void mpsd_ahead_end(struct mpsd_made *made);
void mpsd_ahead_forget(struct mpsd_made *made);

/* In a move, before twins become what is in use: one that is not what the record is of does not. */
void mpsd_ahead_move(struct mpsd_made *made);

/* Whether what is made of the one may need the other. */
bool mpsd_ahead_needs(const struct mpsd_made *made, const struct mpsd_made *other);
