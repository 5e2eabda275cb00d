"""mpsd-ctl, the operator's command. It talks to the daemon through mpsd_client alone."""
