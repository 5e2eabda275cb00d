/* SPDX-License-Identifier: MIT */
/* Small copies by a kernel of this library's, in place of the driver's. */
#pragma once

#include "exact/state.h"

/* With the order, before the operation is noted: whether it is such a copy. */
bool mpsd_copier_makes(const struct mpsd_op *op);

/* After that: it is given to the GPU, and says itself that it has ended where it is staged. What the kernel cannot, the driver does. */
CUresult mpsd_copier_issue(const struct mpsd_op *op);

/*
 * The same of a copy within the GPU where what it writes is saved already, and nothing else is to be done before it is
 * noted, at once. False: it is not submitted.
 */
bool mpsd_copier_at_once(const struct mpsd_op *given, CUresult *result);
