/* SPDX-License-Identifier: MIT */
/*
 * Room for the operations of launches, which are many, come one after the other, and go together when their epoch ends:
 * so they lie one behind the other, in memory that the processor still has at hand.
 */
#pragma once

#include <stddef.h>

struct mpsd_shelf;

/*
 * One thread at a time. Room for so many bytes, at a multiple of 16, and the shelf that it is given back to; NULL: there
 * is none.
 */
void *mpsd_shelf_take(size_t size, struct mpsd_shelf **shelf);

/* Once for each that was taken, by any thread. */
void mpsd_shelf_give(struct mpsd_shelf *shelf);

void mpsd_shelf_child(void);
