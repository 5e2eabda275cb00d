/* SPDX-License-Identifier: MIT */
/* Sums of the window's pages, kept on the GPU: in memory of the window, so that they outlive the context. */
#pragma once

#include "exact/stamps.h"

/* Whether they can be taken now, as far as is known. */
bool mpsd_sums_may(void);

/* With the order: these pages', into that stream of the copy of this call. NOT_SUPPORTED: there is no room for them. */
CUresult mpsd_sums_take(const struct mpsd_pages *pages, unsigned int count, CUstream stream);

/*
 * In a move, with the lock, in the context in use: begun() submits the comparison of these pages with their sums into the
 * legacy stream, and differ() is its result, once that has come so far.
 */
CUresult mpsd_sums_compare(const struct mpsd_pages *pages, unsigned int count);
bool mpsd_sums_differ(void);
