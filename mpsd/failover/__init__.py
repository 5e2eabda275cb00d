"""Fail-over, the daemon's side of it: what is said with programs, and the copies of the driver."""
