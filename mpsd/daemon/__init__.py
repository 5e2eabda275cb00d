"""The assembly of the daemon: the only package that may import every other one."""
