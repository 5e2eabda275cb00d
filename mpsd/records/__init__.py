"""Output of the daemon: journal, events, state file."""
