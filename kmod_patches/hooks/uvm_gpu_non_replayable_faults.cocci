// SPDX-License-Identifier: GPL-2.0 OR MIT
// Description: Non-replayable faults (copy engines, PBDMA): hook 2 offers a fatal one to the isolation. What
//  it takes is no longer fatal, so that the driver clears the faulted bit and kills no channel.
// Applies-to: nvidia-uvm/uvm_gpu_non_replayable_faults.c of the open kernel modules 535 to 595
// Forwarded: no
@include@
@@
  #include "uvm_common.h"
+ #include "mpsd-uvm.h"

@isolate depends on include@
identifier service =~ "^service_fault(_once)?$";
expression entry, batch, tracker;
identifier status;
symbol gpu;
@@
  service(...)
  {
  <...
+ if (status == NV_OK && entry->is_fatal && mpsd_isolate_non_replayable(gpu, entry->va_space, entry, batch))
+     entry->is_fatal = false;
  if (status == NV_OK && !entry->is_fatal) {
      ...
      clear_faulted_on_gpu(..., entry, batch, tracker)
      ...
  }
  ...>
  }
