"""Faults around the death of mpsd, and bursts of faults."""
