/* SPDX-License-Identifier: MIT */
/* What each copy of the driver has with the resource manager. `number` is below MPSD_COPY_NUMBERS. Any thread's. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "failoverwire.h"

#define MPSD_OWNED_MOST 16

/* A device with a context, as the copy's own client of the resource manager names it. */
struct mpsd_owned {
	int fd;
	uint32_t root, name, debugger, channel;	/* its debugger; its first channel */
};

/* The copy's ioctl() has succeeded. */
void mpsd_owned_note(unsigned int number, int fd, unsigned long request, const void *argument);

/* The copy is loaded anew. */
void mpsd_owned_forget(unsigned int number);

/* Those that can be asked what an exception was. How many. */
unsigned int mpsd_owned_devices(unsigned int number, struct mpsd_owned devices[MPSD_OWNED_MOST]);

/* Whether it is an address of the copy's, of somebody else's, or that is not known: it has had too many. */
enum mpsd_failover_whose mpsd_owned_whose(unsigned int number, uint64_t pc);

/* Whether the copy has mapped all of [start, end) for its GPU, and no other one any of it. */
bool mpsd_owned_alone(unsigned int number, uint64_t start, uint64_t end);

/* In a forked child. */
void mpsd_owned_child(void);
