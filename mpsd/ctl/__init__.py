"""mpsd-ctl: the operator's command. Talks to the daemon through mpsd_client alone."""
