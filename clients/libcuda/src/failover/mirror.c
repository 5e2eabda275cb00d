// SPDX-License-Identifier: MIT
#include "failover/mirror.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "failover/carry.h"
#include "failover/copy.h"
#include "failover/descriptors.h"
#include "failover/kept.h"
#include "failover/line.h"
#include "failover/made.h"
#include "turn.h"
#include "windows.h"

static bool on, keeps;
static const char *fault;

const char *mpsd_mirror_fault(void)
{
	return fault;
}

static bool fails(const char *why)
{
	if (!fault)
		fault = why;
	mpsd_line_wake();
	return false;
}

static size_t bytes_of(const struct window *window)
{
	return window->arena.granules * ARENA_GRANULE;
}

/* The copies' contexts have address spaces of their own; what lies here is the process's alone. */
static bool reserve(CUdeviceptr base, size_t size)
{
	static char said[96];
	CUdeviceptr got = 0;
	CUresult result;

	mpsd_copy_place(base, size);
	result = other_cuMemAddressReserve(&got, size, ARENA_GRANULE, base, 0);
	mpsd_copy_place(0, 0);

	if (result == CUDA_SUCCESS && got == base)
		return true;
	snprintf(said, sizeof(said), "the standby context's window is at 0x%llx instead of 0x%llx (%d)", (unsigned long long)got,
		 (unsigned long long)base, (int)result);
	if (got)
		other_cuMemAddressFree(got, size);
	return fails(said);
}

static bool enter_context(CUdevice device)
{
	struct mpsd_made *context;
	bool is;

	mpsd_made_lock();
	context = mpsd_made_context(device);
	while (context && context == mpsd_made_held()) {
		mpsd_made_wait();
		context = mpsd_made_context(device);
	}
	is = context && context->is_twin && other_cuCtxSetCurrent(context->twin) == CUDA_SUCCESS;
	mpsd_made_unlock();
	return is || fails("the device has no standby context");
}

static bool map_with(struct arena_range range, int fd, const CUmemAccessDesc *access, size_t accesses)
{
	CUmemGenericAllocationHandle handle;
	bool mapped;

	mapped = other_cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)fd,
						      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == CUDA_SUCCESS;
	mpsd_descriptors_given(fd);
	if (!mapped)
		return fails("cuMemImportFromShareableHandle");
	mapped = other_cuMemMap(range.base, range.size, 0, handle, 0) == CUDA_SUCCESS;
	if (mapped && accesses && other_cuMemSetAccess(range.base, range.size, access, accesses) != CUDA_SUCCESS) {
		other_cuMemUnmap(range.base, range.size);
		mapped = false;
	}
	other_cuMemRelease(handle);
	return mapped || fails("cuMemMap");
}

static bool map_there(struct arena_range range, CUdevice device, int fd)
{
	CUmemAccessDesc access = { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device },
				   .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };

	return map_with(range, fd, &access, 1);
}

static bool take_descriptor(int *fd, CUmemGenericAllocationHandle handle)
{
	bool turn = mpsd_turn_take(), is;

	is = real_cuMemExportToShareableHandle(fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS;
	mpsd_turn_give(turn);
	if (!is)
		return fails(mpsd_moves_done() ? "cuMemExportToShareableHandle of imported memory (RLIMIT_NOFILE)"
					       : "cuMemExportToShareableHandle");
	mpsd_descriptors_given(*fd);
	fcntl(*fd, F_SETFD, FD_CLOEXEC);
	return true;
}

static bool keep(struct arena_range range, CUdevice device, CUmemGenericAllocationHandle handle)
{
	int fd;

	(void)device;
	return take_descriptor(&fd, handle) && (mpsd_kept_add(range.base, fd) || fails("RLIMIT_NOFILE"));
}

static bool mirror(struct arena_range range, CUdevice device, CUmemGenericAllocationHandle handle)
{
	bool is;
	int fd;

	if (!take_descriptor(&fd, handle))
		return false;
	is = map_there(range, device, fd);
	mpsd_kept_add(range.base, fd);
	return is;
}

static bool with_handle(struct arena_range range, CUdevice device,
			bool (*call)(struct arena_range, CUdevice, CUmemGenericAllocationHandle))
{
	CUmemGenericAllocationHandle handle;
	bool is, turn;

	if (real_cuMemRetainAllocationHandle(&handle, (void *)range.base) != CUDA_SUCCESS)
		return fails("cuMemRetainAllocationHandle");
	is = call(range, device, handle);
	turn = mpsd_turn_take();
	real_cuMemRelease(handle);
	mpsd_turn_give(turn);
	return is;
}

/* A lost context is asked nothing where there is a descriptor already. */
static bool mirror_piece(struct arena_range range, CUdevice device)
{
	int fd = mpsd_kept_find(range.base);
	struct mpsd_mapped mapped;

	if (mpsd_vmm_find(range.base, &mapped))
		return map_with(range, mapped.fd, mapped.access, mapped.accesses);
	return fd >= 0 ? map_there(range, device, fd) : with_handle(range, device, mirror);
}

static bool keep_piece(struct arena_range range, CUdevice device)
{
	struct mpsd_mapped mapped;

	return mpsd_vmm_find(range.base, &mapped) || mpsd_kept_find(range.base) >= 0 ||
	       with_handle(range, device, keep);
}

static bool for_each(const struct window *window, CUdevice device, bool (*call)(struct arena_range, CUdevice))
{
	struct arena_range piece = { window->arena.base, 0 };

	while (arena_next_piece(&window->arena, piece.base + piece.size, &piece))
		if (!call(piece, device))
			return false;
	return true;
}

static bool mirror_window(struct window *window, CUdevice device)
{
	return enter_context(device) && reserve(window->arena.base, bytes_of(window)) &&
	       for_each(window, device, mirror_piece);
}

bool mpsd_mirror_begin(const char **why)
{
	fault = NULL;
	on = true;
	for (int i = 0; i < DEVICES && !fault; i++)
		if (mpsd_windows[i].open)
			mirror_window(&mpsd_windows[i], i);
	*why = fault;
	return !fault;
}

bool mpsd_mirror_keep(const char **why)
{
	fault = NULL;
	keeps = true;
	for (int i = 0; i < DEVICES && !fault; i++)
		if (mpsd_windows[i].open)
			for_each(&mpsd_windows[i], i, keep_piece);
	*why = fault;
	return !fault;
}

void mpsd_mirror_keep_end(void)
{
	keeps = false;
}

static void unmap_all(void)
{
	for (int i = 0; i < DEVICES; i++) {
		struct window *window = &mpsd_windows[i];
		struct arena_range piece = { window->arena.base, 0 };

		while (window->open && arena_next_piece(&window->arena, piece.base + piece.size, &piece))
			other_cuMemUnmap(piece.base, piece.size);
		if (window->open)
			other_cuMemAddressFree(window->arena.base, bytes_of(window));
	}
}

void mpsd_mirror_end(bool unmap)
{
	if (on && unmap)
		unmap_all();
	on = false;
	fault = NULL;
}

void mpsd_mirror_window(CUdevice device, CUdeviceptr base, size_t size)
{
	if (on && !fault && enter_context(device))
		reserve(base, size);
}

void mpsd_mirror_born(struct arena_range range, CUdevice device, CUmemGenericAllocationHandle handle)
{
	if (on && !fault && enter_context(device))
		mirror(range, device, handle);
	else if (keeps && !on && !fault)
		keep(range, device, handle);
}

void mpsd_mirror_mapped(struct arena_range range, CUdevice device, const struct mpsd_mapped *mapped)
{
	if (on && !fault && enter_context(device))
		map_with(range, mapped->fd, mapped->access, mapped->accesses);
}

void mpsd_mirror_access(struct arena_range range, CUdevice device, const CUmemAccessDesc *access, size_t count)
{
	if (on && !fault && enter_context(device) &&
	    other_cuMemSetAccess(range.base, range.size, access, count) != CUDA_SUCCESS)
		fails("cuMemSetAccess");
}

void mpsd_mirror_gone(struct arena_range range)
{
	mpsd_kept_drop(range.base);
	if (on && !fault)
		other_cuMemUnmap(range.base, range.size);
}
