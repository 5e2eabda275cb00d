"""Thin typed wrappers over what Linux offers: /proc, inotify, growing files, bounded commands.

The lowest layer beside `errors` and `model`: adapters import it, it imports no adapter.
"""
