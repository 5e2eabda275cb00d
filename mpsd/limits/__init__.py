"""Limits of clients: thread percentage, priority and device memory, kept for each slot."""
