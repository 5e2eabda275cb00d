"""Fault classification, attribution and records. Pure: no I/O, no clock, no threads."""
