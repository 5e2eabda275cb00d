"""The operations that answer requests, the status view, privacy and doctor."""
