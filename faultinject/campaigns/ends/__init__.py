"""Leftovers of programs that failed over, and the growth of one that does so often."""
