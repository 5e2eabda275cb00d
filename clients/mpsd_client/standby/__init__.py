"""mpsd-standby: run a program and a second process of it that waits to take over."""
