/* SPDX-License-Identifier: MIT */
/*
 * Stream capture, as far as memory is concerned. While one is under way cuCtxSynchronize would spoil it,
 * whoever's it is, and the driver's own cuMemAlloc and cuMemFree may be allowed all the same: that
 * depends on the mode and on who asks. So the driver is asked with an allocation of its own, and what
 * the program frees meanwhile is freed later, when a wait is allowed.
 */
#pragma once

#include <cuda.h>
#include <stdbool.h>

/* Whether a capture is under way that this library saw begin. */
bool mpsd_capture_active(void);

/* The copy of the driver after so many moves comes into use: none is under way there. */
void mpsd_capture_copy(uint64_t moves);

/* The primary context of that device has ended, and what was captured in it; the memory's lock may be held. */
void mpsd_capture_context_ended(CUdevice device);

/* What the driver says now of cuMemAlloc and cuMemFree by this thread, in its current context. */
CUresult mpsd_capture_probe(void);

/* CUDA_ERROR_INVALID_VALUE for what is put off already. */
CUresult mpsd_capture_put_off(CUdeviceptr base);

/* Whether there is one of those to be freed now: none while a capture is under way. */
bool mpsd_capture_has_put_off(void);

/* One of them; false where there is none. */
bool mpsd_capture_take(CUdeviceptr *base);

/* Its memory ended otherwise. */
void mpsd_capture_forget(CUdeviceptr base);
