/* SPDX-License-Identifier: MIT */
/* What a copy of the driver wants to know of a context that it has lost. */
#pragma once

#include <stdbool.h>

#include "failover/copy.h"

/* For a copy's slot, in place of ioctl(). `number` is below MPSD_COPY_NUMBERS. */
void *mpsd_autopsy_ioctl(unsigned int number);

/* The copy comes into use, or nobody wants to know it any more. Any thread's. */
void mpsd_autopsy_none(unsigned int number, bool is);
