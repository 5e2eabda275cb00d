"""Attacks of other local users, and faults of the machine, on a running mpsd. Each has a deadline.

All of them together take at most two minutes. `scripts/test tests/attacks` runs them alone.
"""
