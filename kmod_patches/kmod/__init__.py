"""The patch to nvidia-uvm: find the driver's source, apply or reverse the patch, build and install.

aptsources derives a private apt source, debian fetches with it, tree describes a driver source, hooks applies
and reverses the semantic patch, build runs the driver's makefile. The repository holds no text of the driver.
"""
