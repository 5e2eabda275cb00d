// SPDX-License-Identifier: MIT
#include "export.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "proxy.h"
#include "turn.h"

static atomic_int exported = -1;

bool mpsd_export(CUdevice device, CUmemGenericAllocationHandle handle, const atomic_bool *off,
		 struct mpsd_vault_message *message)
{
	bool turn = mpsd_turn_take();
	CUuuid uuid;
	int fd = -1;

	if (!atomic_load(off) && real_cuDeviceGetUuid_v2(&uuid, device) == CUDA_SUCCESS &&
	    real_cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) ==
		    CUDA_SUCCESS) {
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
