// SPDX-License-Identifier: GPL-2.0 OR MIT
// Description: Non-replayable faults (copy engines, PBDMA): hook 2 offers a fatal one to the isolation. What
//  it takes is no longer fatal, so that the driver clears the faulted bit and kills no channel. Hook 8 tells
//  of those for which a channel is killed without that offer: fatal by their type, or out of memory.
// Applies-To: nvidia-uvm/uvm_gpu_non_replayable_faults.c of the open kernel modules 535 to 595
// Origin: other, written for mpsd: no text of the driver's
// Forwarded: no
// Last-Update: 2026-11-23
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
+ if (status == NV_OK && entry->is_fatal && mpsd_isolate_non_replayable(gpu, entry->va_space, entry))
+     entry->is_fatal = false;
  if (status == NV_OK && !entry->is_fatal) {
      ...
      clear_faulted_on_gpu(..., entry, batch, tracker)
      ...
  }
  ...>
  }

// Where no fault is served: on that way nothing comes.
@killed depends on include@
identifier entry, channel;
@@
  schedule_kill_channel(..., uvm_fault_buffer_entry_t *entry, uvm_user_channel_t *channel)
  {
  <...
+ mpsd_given_back(channel->gpu, entry->va_space, entry);
  if (channel->kill_channel.scheduled)
      return;
  ...>
  }
