// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * What nvidia-uvm asks of the resource manager while it loads, before any GPU is known. The
 * headers are the driver's own, taken from its source tree when the stub is built.
 */
#include <linux/string.h>

#include "nv_uvm_interface.h"

#include "stub.h"

static bool session_open;
/* The caller's table; it unregisters before it is unloaded. */
static const struct UvmOpsUvmEvents *callbacks;

const struct UvmOpsUvmEvents *mpsd_stub_callbacks(void);

/* UVM never looks behind it, but takes 0 for no session. */
static uvmGpuSessionHandle handle(void)
{
	return (uvmGpuSessionHandle)&session_open;
}

/* A platform of which nothing special is true: no ATS, no confidential computing. */
NV_STATUS nvUvmInterfaceSessionCreate(uvmGpuSessionHandle *session, UvmPlatformInfo *platform)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceSessionCreate);
	if (session_open)
		return NV_ERR_INVALID_STATE;
	session_open = true;
	*session = handle();
	memset(platform, 0, sizeof(*platform));
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceSessionCreate);

NV_STATUS nvUvmInterfaceSessionDestroy(uvmGpuSessionHandle session)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceSessionDestroy);
	if (!session_open || session != handle())
		return NV_ERR_INVALID_ARGUMENT;
	session_open = false;
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceSessionDestroy);

NV_STATUS nvUvmInterfaceRegisterUvmCallbacks(struct UvmOpsUvmEvents *events)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceRegisterUvmCallbacks);
	if (!events || callbacks)
		return NV_ERR_INVALID_STATE;
	callbacks = events;
	return NV_OK;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceRegisterUvmCallbacks);

void nvUvmInterfaceDeRegisterUvmOps(void)
{
	mpsd_stub_answered(CALL_nvUvmInterfaceDeRegisterUvmOps);
	callbacks = NULL;
}
MPSD_STUB_ANSWERS(nvUvmInterfaceDeRegisterUvmOps);

const struct UvmOpsUvmEvents *mpsd_stub_callbacks(void)
{
	return READ_ONCE(callbacks);
}

static int __init stub_init(void)
{
	int error = mpsd_stub_journal_open();

	if (error)
		return error;
	error = mpsd_gpu_open();
	if (error)
		mpsd_stub_journal_close();
	return error;
}

static void __exit stub_exit(void)
{
	WARN_ON(session_open || callbacks);
	mpsd_gpu_close();
	mpsd_stub_journal_close();
}

module_init(stub_init);
module_exit(stub_exit);
MODULE_DESCRIPTION("Stands in for nvidia.ko on a machine without a GPU");
MODULE_VERSION(MPSD_STUB_VERSION);
MODULE_LICENSE("Dual MIT/GPL");
