"""Fail-over decisions: participants, offers, moves, serial replay, attribution. Pure."""
