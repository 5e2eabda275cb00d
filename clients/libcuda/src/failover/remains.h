/* SPDX-License-Identifier: MIT */
/* What the program's first copy of the driver keeps on the GPU when it is left, for it is never unloaded. */
#pragma once

#include <stdbool.h>

/* A call of ioctl() by that copy has returned 0. Any thread's. */
void mpsd_remains_note(int fd, unsigned long request, const void *argument);

/* The stand-in's way, which has no resource manager. */
void mpsd_remains_know(void *library);

/*
 * All of it is given back, on a thread of its own: its contexts, with their channels and memory. Nobody is inside that
 * copy, and nothing that its work may still write is needed. False: not now.
 */
bool mpsd_remains_end(void);

/* In the child of a fork, whoever had the lock. */
void mpsd_remains_child(void);
