/* SPDX-License-Identifier: MIT */
/* Which kernels are in flight, as far as it costs a launch next to nothing to know. */
#pragma once

#include <cuda.h>

/* A context came to be, or ended. While there is only one, a wait for it is a wait for everything. */
void mpsd_launches_context(CUcontext context);
void mpsd_launches_no_context(CUcontext context);
