/* SPDX-License-Identifier: MIT */
/*
 * Room for the operations of launches, which are many, come one after the other, and go together when their epoch ends:
 * so they lie one behind the other, in memory that the processor still has at hand.
 */
#pragma once

#include <stddef.h>

struct mpsd_shelf;

/*
 * With the lock of the epoch. Room for so many bytes, at a multiple of 16, and the shelf that it is given back to; NULL: there
 * is none.
 */
void *mpsd_shelf_take(size_t size, struct mpsd_shelf **shelf);

/* What it is given next is about to be written: from the processor's far memory by then. */
void mpsd_shelf_fetch(void);

/* With the same lock: if all that was taken has been given back, the next one lies where the first one did. */
void mpsd_shelf_rest(void);

/* Once for each that was taken, by any thread. */
void mpsd_shelf_give(struct mpsd_shelf *shelf);

void mpsd_shelf_take_back(struct mpsd_shelf *shelf);	/* by one that has the lock, too */

void mpsd_shelf_child(void);
