/* SPDX-License-Identifier: MIT */
/* What a copy of the driver wants to know of a context that it has lost. */
#pragma once

#include <stdbool.h>

#include "failover/copy.h"

/* For a copy's slot, in place of ioctl(). `number` is below MPSD_COPY_NUMBERS. */
void *mpsd_autopsy_ioctl(unsigned int number);

/* The copy is being left, and nobody wants to know it any more; or it comes into use. Any thread's. */
void mpsd_autopsy_left(unsigned int number, bool is);
