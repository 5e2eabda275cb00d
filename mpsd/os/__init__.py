"""Typed wrappers over Linux: /proc, pidfds, inotify, growing files, bounded commands, threaded probes.

The lowest layer of adapters. Other adapters import this package; besides `base` it imports none of them.
"""
