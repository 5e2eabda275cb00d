// SPDX-License-Identifier: GPL-2.0 OR MIT
// Description: A stable kernel took pci_resize_resource()'s fourth argument (the BARs to leave alone) from a
//  newer one, and drivers before 580.142 pass three. 0 leaves none alone, as three arguments did.
// Applies-to: nvidia/nv-pci.c of drivers without a test for it, where the kernel's header has four parameters
// Forwarded: not-needed, newer drivers test for it
@@
expression device, bar, size;
@@
  pci_resize_resource(device, bar, size
+                     , 0
                      )
