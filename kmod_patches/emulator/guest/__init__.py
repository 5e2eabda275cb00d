"""What runs inside the virtual machine: init is its first process, checks are what it does."""
