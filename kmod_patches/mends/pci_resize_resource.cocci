// SPDX-License-Identifier: GPL-2.0 OR MIT
// Description: A stable kernel took pci_resize_resource()'s fourth argument (the BARs to leave alone) from a
//  newer one, and drivers before 580.142 pass three. 0 leaves none alone, as three arguments did. Newer drivers
//  test for it themselves.
// Applies-To: nvidia/nv-pci.c of drivers without a test for it, where the kernel's header has four parameters
// Origin: other, written for mpsd: no text of the driver's
// Forwarded: not-needed
// Last-Update: 2026-11-22
// Last-Checked: 535.261.03 550.163.01 555.58.02
@@
expression device, bar, size;
@@
  pci_resize_resource(device, bar, size
+                     , 0
                      )
