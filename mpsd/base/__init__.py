"""Values and errors that every package shares: no I/O except standard output and the log."""
