// SPDX-License-Identifier: GPL-2.0 OR MIT
// Description: Non-replayable faults (copy engines, PBDMA): hook 2 offers a fatal one to the isolation. What
//  it takes is no longer fatal, so that the driver clears the faulted bit and kills no channel.
// Applies-To: nvidia-uvm/uvm_gpu_non_replayable_faults.c of the open kernel modules 535 to 595
// Origin: other, written for mpsd: no text of the driver's
// Forwarded: no
// Last-Update: 2026-11-22
// Last-Checked: 535.261.03 550.163.01 555.58.02
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
