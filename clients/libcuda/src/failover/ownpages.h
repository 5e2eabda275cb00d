/* SPDX-License-Identifier: MIT */
/* Pages that a copy of the driver shares with the GPU. */
#pragma once

#include <stdint.h>

struct mpsd_pages {
	uint64_t from, to;
};

/* Where those of these copies are, that no other copy has too: so many, `most` at most. */
unsigned int mpsd_pages_find(const unsigned int *numbers, unsigned int count, struct mpsd_pages *found, unsigned int most);

/*
 * They become the process's own, with what they hold. The copy was left, nobody is inside it, and it gives the GPU nothing
 * any more. On one thread at a time.
 */
void mpsd_pages_keep(unsigned int number);
