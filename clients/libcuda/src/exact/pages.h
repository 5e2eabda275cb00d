/* SPDX-License-Identifier: MIT */
#pragma once

#include "arena.h"
#include "exact/state.h"

/* mpsd_page_sums(base, sums), as text for the driver; and a launch of it, for so many pages. */
extern const char mpsd_pages_code[];
CUresult mpsd_pages_add_up(CUfunction function, CUdeviceptr base, size_t count, CUdeviceptr sums, CUstream stream);

/* With the order, and nothing open. Room for that many sums; the calls below need it before, in the same copy. */
CUresult mpsd_pages_ready(size_t pages);

/* A number for each page of these pieces, one after the other: of the same bytes it is the same. They are mapped meanwhile. */
CUresult mpsd_pages_sum(const struct arena_range *pieces, size_t count, const uint64_t **sums);

/* All of these, one behind the other, beside all streams: a capture that is under way is not touched. */
CUresult mpsd_pages_read(char *to, const struct arena_range *from, size_t count);
