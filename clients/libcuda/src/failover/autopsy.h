/* SPDX-License-Identifier: MIT */
/* What a copy of the driver wants to know of a context that it has lost. */
#pragma once

#include <stdbool.h>

#include "failover/copy.h"

/* For a copy's slot, in place of ioctl(). `number` is below MPSD_COPY_NUMBERS. */
void *mpsd_autopsy_ioctl(unsigned int number);

/* The copy is being left, and nobody wants to know it any more; or it comes into use. Any thread's. */
void mpsd_autopsy_left(unsigned int number, bool is);

/* Around calls of the thread of line.c into the instance in use: no look waits for the daemon meanwhile. They may nest. */
void mpsd_autopsy_line_calls(bool is);

/* Whether it has asked since it came into use. Any thread's. */
bool mpsd_autopsy_has_looked(unsigned int number);

/* Of a library that is loaded: what a driver without a resource manager has in place of it. */
void mpsd_autopsy_know(unsigned int number, void *library);

/* As the copy's own ioctl(), of which nothing is noted, and which nobody refuses. */
int mpsd_autopsy_ask(unsigned int number, int fd, unsigned long request, void *argument);
