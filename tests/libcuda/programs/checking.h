/* SPDX-License-Identifier: MIT */
/* What the test programs check with, and draw numbers by. */
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* Says which one did not hold, and where, and ends the program. */
#define CHECK(condition) do {								\
	if (!(condition)) {								\
		fprintf(stderr, "line %d: %s\n", __LINE__, #condition);			\
		exit(1);								\
	}										\
} while (0)

/* The next number of a row that `state` begins, the same each time. */
static inline uint64_t random_below(uint64_t *state, uint64_t limit)
{
	*state = *state * 6364136223846793005ull + 1442695040888963407ull;
	return (*state >> 33) % limit;
}
