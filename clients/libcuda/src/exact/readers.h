/* SPDX-License-Identifier: MIT */
/*
 * MPSD_FAILOVER_READS, a file: of kernels, by which words of their parameters they were seen to read alone. Validation
 * writes it; without that it is read, and what such words lead to is mostly not saved (still.h).
 */
#pragma once

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MPSD_READER_WORD 8	/* addresses lie at multiples of it */

struct mpsd_reader {
	struct mpsd_reader *next;
	char *name;
	uint64_t print;			/* of what else the driver says of the function */
	uint32_t words;
	uint64_t *reads, *writes;	/* a bit for each word that was an address: what it led to never changed, did */
};

/* By one thread, when the program wishes to be exact. `learns`: the file is written in the end. */
void mpsd_readers_start(bool learns);

/* Whether anything is known, or to be learned. */
extern bool mpsd_readers_any;

/*
 * Without the lock, for it asks the driver. NULL: nothing is known of it. `places`: where its parameters are, so many bytes
 * of description; `end`: behind the last one. Kept for good.
 */
struct mpsd_reader *mpsd_reader_of(CUfunction function, bool is_kernel, const void *places, size_t size, uint32_t end);

static inline bool mpsd_reader_is(const struct mpsd_reader *reader, size_t offset)
{
	uint32_t word = (uint32_t)(offset / MPSD_READER_WORD);

	return reader && word < reader->words && reader->reads[word / 64] >> word % 64 & 1 &&
	       !(reader->writes[word / 64] >> word % 64 & 1);
}

/* By one thread at a time, in validation: after a launch what that word leads to has changed, or not. */
void mpsd_reader_saw(struct mpsd_reader *reader, size_t offset, bool has_changed);

/*
 * By one thread at a time: what is news goes into the file, beside what is there of other runs. That something is written
 * at once, for programs are killed; the rest now and then, and `in_the_end`.
 */
void mpsd_readers_keep(bool in_the_end);
