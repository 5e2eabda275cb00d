// SPDX-License-Identifier: MIT
/*
 * Where the window of a device lies: far from where the loader, the heap and the driver's own reservations
 * were seen, and each device's in a part of its own, so that two do not want the same place. A hint only:
 * any place will do. Several times the memory, so that holes never make an allocation fail, and the zones
 * around as many pieces as there can be; around fewer, where so many addresses cannot be had.
 */
#include "window.h"

#include "arena.h"
#include "proxy.h"

#define FIRST ((CUdeviceptr)0x200000000000)
#define APART ((CUdeviceptr)1 << 43)
#define HINTS 10
#define TIMES 4
#define FEWEST_PIECES 16

CUdeviceptr mpsd_window_reserve(CUdevice device, size_t total, size_t zone, size_t *size)
{
	CUdeviceptr base, hint = device < HINTS ? FIRST + (CUdeviceptr)device * APART : 0;
	size_t granules = total / ARENA_GRANULE + 1, pieces = granules;

	do {
		*size = granules * ARENA_GRANULE * TIMES + pieces * 2 * zone;
		if (!real_cuMemAddressReserve(&base, *size, ARENA_GRANULE, hint, 0))
			return base;
		pieces /= 4;
	} while (zone && pieces >= FEWEST_PIECES);
	return 0;
}
