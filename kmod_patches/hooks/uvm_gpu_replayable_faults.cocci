// SPDX-License-Identifier: GPL-2.0 OR MIT
// Description: Replayable faults: hook 1 offers a fatal one to the isolation before it is cancelled; hook 7
//  tells of work whose address space is gone, which the driver answers by ending everything in its TSG.
// Applies-To: nvidia-uvm/uvm_gpu_replayable_faults.c of the open kernel modules 535 to 595
// Origin: other, written for mpsd: no text of the driver's
// Forwarded: no
// Last-Update: 2026-11-23
// Last-Checked: 535.261.03 550.163.01 555.58.02
@include@
@@
  #include "uvm_common.h"
+ #include "mpsd-uvm.h"

// True means that a sparse page is under the address, and the replay that the caller does anyway lets the
// access end. Before the tools event: what hears that takes it that the channel group ends.
@isolate depends on include@
expression gpu, entry, id, space, reason, kind, info;
@@
  cancel_fault_precise_va(...)
  {
  <...
+ if (mpsd_isolate_replayable(gpu, entry->va_space, entry, info->batch_service_context.batch_id))
+     return NV_OK;
  uvm_tools_record_gpu_fatal_fault(id, space, entry, reason);
  ... when any
  uvm_push_begin_acquire(gpu->channel_manager, kind, &info->replay_tracker, ...)
  ...>
  }

@orphan depends on include@
expression gpu, entry, wide;
@@
  translate_instance_ptrs(...)
  {
  <...
+ mpsd_orphan(gpu, entry);
  if (wide) {
      ...
      push_cancel_on_gpu_targeted(gpu, entry->instance_ptr, ...)
      ...
  }
  else {
      ...
      push_cancel_on_gpu_global(gpu, entry->instance_ptr, ...)
      ...
  }
  ...>
  }
