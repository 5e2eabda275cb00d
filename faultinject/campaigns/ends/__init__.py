"""What programs leave behind after fail-overs, and what a long life under them costs."""
