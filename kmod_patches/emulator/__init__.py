"""The real nvidia-uvm in a virtual machine without a GPU, on top of a stub of nvidia.ko.

stub builds the module from which UVM imports, kernel unpacks a Debian kernel, image packs the guest's files,
vm boots them and reads the guest's output. guest/ runs inside.
"""
