"""The patch to nvidia-uvm: finds the driver's source, puts the patch in, takes it out, builds.

aptsources derives a private apt source, debian fetches with it, tree knows a driver source, hooks applies and
reverses the semantic patch, build runs the driver's own makefile. No text of the driver's is kept here.
"""
