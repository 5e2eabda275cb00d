/* SPDX-License-Identifier: MIT */
#pragma once

#include "exact/params.h"

/* With the lock: whether the driver has accepted such a launch of the same kernel. */
bool mpsd_shape_is_accepted(const struct mpsd_op *op);

/* Without the lock: it has. */
void mpsd_shape_accept(const struct mpsd_launch *given);

/* Without the lock: what it says of that kernel may be another thing from here on. */
void mpsd_shapes_forget(CUfunction function);
