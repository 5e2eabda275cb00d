/* SPDX-License-Identifier: MIT */
/* The device files of each copy of the driver, which it leaves open when it is unloaded. */
#pragma once

/* For a copy's slot, in place of close(). `number` is below MPSD_COPY_NUMBERS. */
void *mpsd_descriptors_close(unsigned int number);

/* The copy has called ioctl() with it. Any thread's. */
void mpsd_descriptors_used(unsigned int number, int fd);

/* It was exported from a copy, or imported into one: whoever has it closes it. */
void mpsd_descriptors_given(int fd);

/* The copy is unloaded: close what it has left. */
void mpsd_descriptors_end(unsigned int number);
