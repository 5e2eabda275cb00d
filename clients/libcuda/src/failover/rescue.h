/* SPDX-License-Identifier: MIT */
/* When a program whose context is lost moves by itself, because the daemon is dead or silent. */
#pragma once

#include <stdbool.h>

/* For how long an error is kept from the program while that may come: as mpsd_line_word_ms() has it. Any thread. */
int mpsd_rescue_hold_ms(void);

/* All from here on for the thread of line.c. */

enum mpsd_rescue {
	MPSD_RESCUE_WAIT,		/* the daemon still has time, or nothing is lost */
	MPSD_RESCUE_GIVE_UP,		/* the daemon has heard of it, and moves nobody: the error is the program's own */
	MPSD_RESCUE_MOVE,		/* there is no daemon, or it reads nothing */
};

/* A daemon was connected to: it has as long as one that was there. */
void mpsd_rescue_connected(void);

/* `line` -1: there is no connection. */
enum mpsd_rescue mpsd_rescue_now(int line);

/* Until that is to be asked again; -1: nothing is lost. */
int mpsd_rescue_due_ms(int line);
