"""Runs the real nvidia-uvm in a virtual machine without a GPU, on top of a stub of nvidia.ko.

stub makes the module that UVM imports from, kernel unpacks a Debian kernel, image packs the guest's files, vm
boots them and reads what the guest says; guest/ is what runs inside.
"""
