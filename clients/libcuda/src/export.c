// SPDX-License-Identifier: MIT
#include "export.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "failover/carry.h"
#include "failover/descriptors.h"
#include "proxy.h"
#include "turn.h"

static atomic_int exported = -1;

/* After a fail-over the handle was another copy's, and the memory is mapped in this one. */
static CUresult export_handle(int *fd, CUmemGenericAllocationHandle handle, uint64_t moves, uint64_t base)
{
	bool is_old = moves != mpsd_tables()->moves;
	CUresult result = CUDA_SUCCESS;

	if (is_old)
		result = real_cuMemRetainAllocationHandle(&handle, (void *)base);
	if (result != CUDA_SUCCESS)
		return result;
	result = real_cuMemExportToShareableHandle(fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	if (is_old)
		real_cuMemRelease(handle);
	return result;
}

bool mpsd_export(CUdevice device, CUmemGenericAllocationHandle handle, uint64_t moves, uint64_t base,
		 const atomic_bool *off, struct mpsd_vault_message *message)
{
	bool turn = mpsd_turn_take();
	CUuuid uuid;
	int fd = -1;

	if (!atomic_load(off) && real_cuDeviceGetUuid_v2(&uuid, device) == CUDA_SUCCESS &&
	    export_handle(&fd, handle, moves, base) == CUDA_SUCCESS) {
		mpsd_descriptors_given(fd);
		atomic_store(&exported, fd);
		fcntl(fd, F_SETFD, FD_CLOEXEC);
		memcpy(message->gpu, uuid.bytes, sizeof(message->gpu));
	}
	mpsd_turn_give(turn);
	return fd >= 0;
}

int mpsd_exported(void)
{
	return atomic_load(&exported);
}

void mpsd_export_close(void)
{
	int fd = atomic_exchange(&exported, -1);

	if (fd >= 0)
		close(fd);
}
