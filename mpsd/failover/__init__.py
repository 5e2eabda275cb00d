"""Fail-over in the daemon: messages to and from programs, and the driver files."""
