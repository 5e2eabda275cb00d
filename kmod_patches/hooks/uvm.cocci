// SPDX-License-Identifier: GPL-2.0 OR MIT
// Description: Hook 6: our device comes after all else of the module and goes after all else. Address spaces
//  whose destruction was put off go in uvm_global_exit(), and call us. That the device cannot be made is
//  logged and fails nothing.
// Applies-To: nvidia-uvm/uvm.c of the open kernel modules 535 to 595
// Origin: other, written for mpsd: no text of the driver's
// Forwarded: no
// Last-Update: 2026-11-22
// Last-Checked: 535.261.03 550.163.01 555.58.02
@include@
@@
  #include "uvm_common.h"
+ #include "mpsd-uvm.h"

@loaded depends on include@
@@
  uvm_init(...)
  {
  <...
+ mpsd_init();
  return 0;
  ...>
  }

@unloading depends on include@
@@
  uvm_exit(...)
  {
  <...
  uvm_global_exit();
+ mpsd_exit();
  ...>
  }
