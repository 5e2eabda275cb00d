/* SPDX-License-Identifier: MIT */
/* Whose code had the exception from which a domain was lost, as far as a lost copy of the driver can tell. */
#pragma once

#include <stdbool.h>

#include "failoverwire.h"

/* A copy's ioctl() has succeeded. Any thread's. `number` is below MPSD_COPY_NUMBERS. */
void mpsd_blame_note(unsigned int number, int fd, unsigned long request, const void *argument);

/* The copy is loaded anew. */
void mpsd_blame_forget(unsigned int number);

/* All from here on for the thread of line.c. */

/* Ask the driver what is needed later, when nothing may be asked of it. */
void mpsd_blame_prepare(void);

/* Look, beside what goes on, at what the lost copy's context had; the program's own copies ask nothing any more. */
void mpsd_blame_begin(unsigned int number);

/* For a moment, before the driver is asked for more. */
void mpsd_blame_wait(void);

/* What was found; who looks for longer than that is worth has found nothing. */
enum mpsd_failover_whose mpsd_blame_end(void);

/* Whether the daemon knows the word. */
void mpsd_blame_may_tell(bool may);
bool mpsd_blame_is_told(void);
