/* SPDX-License-Identifier: MIT */
/*
 * The way of a copy of the driver to the windows, cut off by UVM itself: neither that copy's code nor the resource
 * manager is waited for.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "arena.h"

/* The copy maps memory by this descriptor of UVM. Any thread's. */
void mpsd_cut_space(unsigned int number, int fd);

/* Before a move of that copy: the loader may be another thread's, which waits for the move. */
void mpsd_cut_know(unsigned int number, void *library);

struct mpsd_cut;

/*
 * Of pieces that the copy has mapped each as a whole, in that order; so many of them, the `first` ones, somebody waits for.
 * NULL: it cannot be done so. With the lock of the windows.
 */
struct mpsd_cut *mpsd_cut_begin(unsigned int number, const struct arena_range *pieces, unsigned int count,
				unsigned int first);

enum mpsd_cut_state {
	MPSD_CUT_GOES_ON,
	MPSD_CUT_DONE,		/* no GPU finds any of the pieces in that copy's address space any more */
	MPSD_CUT_FAILED,
};

/* One thread asks this again and again, which keeps it going. */
enum mpsd_cut_state mpsd_cut_look(struct mpsd_cut *cut);
bool mpsd_cut_is_gone(const struct mpsd_cut *cut, unsigned int piece);

/* The first ones are all gone. */
bool mpsd_cut_is_enough(const struct mpsd_cut *cut);

/* No further piece is begun; until those that are have come back, however long that lasts. */
void mpsd_cut_end(struct mpsd_cut *cut);

/* After that, or NULL. */
void mpsd_cut_discard(struct mpsd_cut *cut);
