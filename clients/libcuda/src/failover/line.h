/* SPDX-License-Identifier: MIT */
/* The thread that talks with the daemon about a standby (failoverwire.h), and makes it. */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

/* Whether the environment names a daemon that offers it (MPSD_FAILOVER_SOCKET). */
bool mpsd_line_offered(void);

/* The program has a context. Only the first call does something. */
void mpsd_line_start(void);

/* A copy of the driver was loaded or started: the process's end waits for this thread before it comes to that. */
void mpsd_line_ends_first(void);

/* Something was made that the standby lacks. */
void mpsd_line_wake(void);

/* Whether a move may come: there is a whole standby, and nothing that could not come along. */
bool mpsd_line_ready(void);

/* The standby is being moved into: after the move has begun, so that nobody sees neither. */
void mpsd_line_moves(void);

/* The program has met the loss of its context, the one after so many `moves`. */
void mpsd_line_error(CUresult result, uint64_t moves);

/* The daemon has not moved it: from now on its errors are its own. */
void mpsd_line_give_up(void);

/* The program uses what cannot come along; `what` stays valid. Each is told once. */
#define MPSD_MOST_OPAQUE 16
void mpsd_line_opaque(const char *what);
unsigned int mpsd_opaque_count(void);
const char *mpsd_opaque_name(unsigned int number);	/* NULL: it is just being written */
