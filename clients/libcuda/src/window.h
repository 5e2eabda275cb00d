/* SPDX-License-Identifier: MIT */
#pragma once

#include <cuda.h>
#include <stddef.h>

/*
 * Addresses for the memory of a device of `total` bytes, and for `zone` bytes on each side of its pieces.
 * `size` is how many there are, a multiple of the granule. 0: they cannot be had.
 */
CUdeviceptr mpsd_window_reserve(CUdevice device, size_t total, size_t zone, size_t *size);
