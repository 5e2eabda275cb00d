"""State that the daemon holds for each client: pin, lease, tracker, guards, the end of its GPU work."""
