/* SPDX-License-Identifier: MIT */
/* Checks and random numbers for the test programs. */
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* Prints the failed check and its place, and ends the program. */
#define CHECK(condition) do {								\
	if (!(condition)) {								\
		fprintf(stderr, "line %d: %s\n", __LINE__, #condition);			\
		exit(1);								\
	}										\
} while (0)

/* The next number of a reproducible sequence that `state` seeds. */
static inline uint64_t random_below(uint64_t *state, uint64_t limit)
{
	*state = *state * 6364136223846793005ull + 1442695040888963407ull;
	return (*state >> 33) % limit;
}
