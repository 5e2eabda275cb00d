// SPDX-License-Identifier: GPL-2.0 OR MIT
// Description: The life of an address space: hook 3 notes its owner, hook 4 says that its channels were
//  stopped and, later, that nothing can reach it any more; hook 5 takes the sinks out of a GPU's page tree
//  before the driver asserts that the tree is empty.
// Applies-To: nvidia-uvm/uvm_va_space.c of the open kernel modules 535 to 595
// Origin: other, written for mpsd: no text of the driver's
// Forwarded: no
// Last-Update: 2026-11-22
// Last-Checked: 535.261.03 550.163.01 555.58.02
@include@
@@
  #include "uvm_common.h"
+ #include "mpsd-uvm.h"

// Only where it has been made in full: the ways out before this free it without uvm_va_space_destroy().
@created depends on include@
identifier out, space != {NULL};
@@
  uvm_va_space_create(..., uvm_va_space_t **out, ...)
  {
  <...
+ mpsd_space_created(space);
  *out = space;
  ...>
  }

@stopped depends on include@
expression space;
@@
  uvm_va_space_destroy(...)
  {
  <...
  uvm_va_space_stop_all_user_channels(space);
+ mpsd_space_stopped(space);
  ...>
  }

// After the bottom halves have been waited for and the GPU address spaces freed.
@destroyed depends on stopped@
identifier space;
expression list;
@@
  uvm_va_space_destroy(uvm_va_space_t *space)
  {
  <...
  uvm_deferred_free_object_list(list);
+ mpsd_space_destroyed(space);
  ...>
  }

@ends depends on include@
expression gpu_space;
@@
  destroy_gpu_va_space(...)
  {
  <...
+ mpsd_gpu_space_ends(gpu_space);
  if (gpu_space->page_tables.root)
      uvm_page_tree_deinit(&gpu_space->page_tables);
  ...>
  }
