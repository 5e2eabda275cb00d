// SPDX-License-Identifier: MIT
/*
 * Where a window lies: far from where the loader, the heap and the driver's own reservations were seen. It
 * has several times the memory, so that holes never make an allocation fail, and zones around as many
 * segments as there can be; around fewer, where so many addresses cannot be had. window_base and
 * window_bytes in MPSD_DEBUG (of each device, the next device's right behind) choose another place and
 * size. Any place will do: what is in use, or refused, is passed over.
 */
#include "window.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "arena.h"
#include "debug.h"
#include "physical.h"
#include "proxy.h"
#include "stats.h"
#include "turn.h"
#include "windows.h"

#define DEFAULT_BASE ((CUdeviceptr)0x200000000000)
#define DEFAULT_STEP ((CUdeviceptr)1 << 43)
#define TIMES 8	/* PyTorch reserves all of the memory and an eighth for each stream, twice */
#define FEWEST_PIECES 16
#define DRIVERS_STEP ((size_t)1 << 30)	/* it was seen to round up to 128 MiB */

/* What an x86-64 process may map, and half of an address space of the driver's. */
#define LOWEST ((CUdeviceptr)4 << 30)
#define END_OF_ADDRESSES ((CUdeviceptr)1 << 47)

struct wish {
	CUdeviceptr base;	/* 0: not chosen */
	size_t size;		/* 0: not chosen */
};

/* Whatever of this process lies there already, as /proc/self/maps has it. */
static bool is_in_use(CUdeviceptr base, size_t size, char *what, size_t room)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	char line[512];
	bool is = false;

	while (maps && !is && fgets(line, sizeof(line), maps)) {
		unsigned long long from, to;

		is = sscanf(line, "%llx-%llx", &from, &to) == 2 && from < base + size && to > base;
	}
	if (maps)
		fclose(maps);
	if (is) {
		line[strcspn(line, "\n")] = 0;
		snprintf(what, room, "%s", line);
	}
	return is;
}

/* True where it lies just there. A driver may take a hint as that, and answer with another place. */
static bool reserve_at(CUdeviceptr wanted, size_t size, CUdeviceptr *base)
{
	if (real_cuMemAddressReserve(base, size, ARENA_GRANULE, wanted, 0) != CUDA_SUCCESS)
		return false;
	if (*base == wanted)
		return true;
	real_cuMemAddressFree(*base, size);
	return false;
}

/* Never changed once the size is there. */
static struct {
	_Atomic(uint64_t) base, size;
} reserved[MPSD_DEVICES];

MPSD_READ_OFTEN struct mpsd_span mpsd_windows_span = MPSD_NO_SPAN;

bool mpsd_window_covers(uint64_t address, size_t size)
{
	for (int i = 0; i < MPSD_DEVICES; i++) {
		uint64_t there = atomic_load(&reserved[i].size), base = atomic_load(&reserved[i].base);

		if (there && address < base + there && address + size > base)
			return true;
	}
	return false;
}

static void note(CUdevice device, enum mpsd_window how, CUdeviceptr base)
{
	uint64_t before = mpsd_stats->window;

	/* The worst of several devices, and the place of the first. */
	if ((before & 3) > (uint64_t)how)
		how = (enum mpsd_window)(before & 3);
	if (device && before >> 2)
		base = before;
	mpsd_stats->window = (base & ~(uint64_t)3) | (uint64_t)how;
}

/* `size` with `lead` bytes below `wanted`, or below wherever it is. */
static bool reserve_somewhere(struct wish wish, CUdevice device, CUdeviceptr wanted, size_t lead, size_t size,
			      CUdeviceptr *base)
{
	char what[512] = "the driver chose another address";
	bool used = is_in_use(wanted - lead, size, what, sizeof(what));

	if (!used && reserve_at(wanted - lead, size, base)) {
		note(device, MPSD_WINDOW_AS_WANTED, wanted);
		return true;
	}
	if (real_cuMemAddressReserve(base, size, ARENA_GRANULE, 0, 0) != CUDA_SUCCESS)
		return false;
	note(device, MPSD_WINDOW_ELSEWHERE, *base + lead);
	if (wish.base)
		mpsd_say("the window of device %d is at 0x%llx instead of 0x%llx (window_base): %s", device,
			 (unsigned long long)(*base + lead), (unsigned long long)wanted, what);
	return true;
}

/* A place that was chosen is the memory's, and not given up for what lies below it: that comes behind then. */
static size_t room_below(struct wish wish, CUdeviceptr wanted, size_t far)
{
	char what[1];

	return !wish.base || (wanted >= LOWEST + far && !is_in_use(wanted - far, far, what, sizeof(what))) ? far : 0;
}

/* To what the driver reserves: the rest of that would be its own, and a second copy's just there. */
static size_t rounded(size_t size)
{
	return (size + DRIVERS_STEP - 1) / DRIVERS_STEP * DRIVERS_STEP;
}

static bool is_lost;

/* Another thread may have been within a call that holds one of these; it is not here. */
static void in_child(void)
{
	is_lost = true;
	mpsd_turn_forget();
	mpsd_windows_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

bool mpsd_window_is_lost(void)
{
	return is_lost;
}

static void watch_forks(void)
{
	pthread_atfork(NULL, NULL, in_child);
}

bool mpsd_window_reserve(CUdevice device, size_t zone, size_t *lead, CUdeviceptr *base, size_t *size)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	struct wish wish = {
		mpsd_debug_number(MPSD_DEBUG_WINDOW_BASE, 0, ARENA_GRANULE, LOWEST, END_OF_ADDRESSES - ARENA_GRANULE),
		mpsd_debug_number(MPSD_DEBUG_WINDOW_BYTES, 0, ARENA_GRANULE, ARENA_GRANULE, END_OF_ADDRESSES / 2),
	};
	size_t total = 0, granules, pieces, far = *lead;
	CUdeviceptr wanted;

	pthread_once(&once, watch_forks);
	if (real_cuDeviceTotalMem_v2(&total, device) != CUDA_SUCCESS)
		return false;
	granules = total / ARENA_GRANULE + 1;
	pieces = granules;
	do {
		*size = wish.size ? wish.size + far
				  : rounded(granules * ARENA_GRANULE * TIMES + pieces * 2 * zone + 2 * far);
		wanted = wish.base ? wish.base + (CUdeviceptr)device * *size
				   : DEFAULT_BASE + (CUdeviceptr)device * DEFAULT_STEP;
		*lead = room_below(wish, wanted, far);
		if (reserve_somewhere(wish, device, wanted, *lead, *size, base)) {
			atomic_store(&reserved[device].base, *base);
			atomic_store(&reserved[device].size, *size);
			mpsd_span_widen(&mpsd_windows_span, *base, *size);
			return true;
		}
		pieces /= 4;
	} while (zone && !wish.size && pieces >= FEWEST_PIECES);
	note(device, MPSD_WINDOW_NONE, 0);
	mpsd_say("vault disabled: no window of 0x%zx bytes for device %d; its memory has no guard zones", *size,
		 device);
	return false;
}

void mpsd_window_give_up(CUdevice device, CUdeviceptr base, size_t size)
{
	atomic_store(&reserved[device].size, 0);
	real_cuMemAddressFree(base, size);
	mpsd_stats->window = MPSD_WINDOW_NONE;
	mpsd_say("vault disabled: no host memory to manage a window of 0x%zx bytes; memory has no guard zones", size);
}

CUmemAllocationProp mpsd_window_property(CUdevice device)
{
	int rdma = 0;

	if (real_cuDeviceGetAttribute(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device))
		rdma = 0;
	return (CUmemAllocationProp){
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device },
		.allocFlags = { .gpuDirectRDMACapable = rdma != 0 },
	};
}
