"""Calls past the proxy and through it within one process, in alternating blocks."""
