"""Code inside the virtual machine: init is its first process, checks run in it."""
