/* SPDX-License-Identifier: MIT */
/* What each copy of the driver has opened, and leaves open when it is unloaded. */
#pragma once

#include <stdbool.h>

/* For a copy's slot, in place of close(). `number` is below MPSD_COPY_NUMBERS. */
void *mpsd_descriptors_close(unsigned int number);

/* The copy has it from a call that makes descriptors; a call that failed is no matter. Any thread's. */
void mpsd_descriptors_made(unsigned int number, int fd);

/* Whether it is known to be that copy's. */
bool mpsd_descriptors_is(unsigned int number, int fd);

/* The copy has called ioctl() with it: a device is the copy's own then. Any thread's. */
void mpsd_descriptors_used(unsigned int number, int fd);

/* It was exported from a copy, or imported into one: whoever has it closes it. */
void mpsd_descriptors_given(int fd);

/* The copy is unloaded: close what it has left. */
void mpsd_descriptors_end(unsigned int number);
