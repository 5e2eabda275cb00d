"""Halting of contexts that run their work in their own processes, as the stand-in driver does.

The GPU process and such a process share two 32-bit values. The first says that the channels are halted:
nothing new may begin. The second counts running operations. A process counts an operation before it reads the
first value, so a count of 0 after a halt means that nothing writes any more.
"""

from __future__ import annotations

import mmap
import os

_HALTED, _RUNNING = 0, 1


class Halt:
    """The shared values of one context."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("mpsd-simulated-halt", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._map = mmap.mmap(self.fd, mmap.PAGESIZE)
        self._words = memoryview(self._map).cast("I")

    def halt(self) -> bool:
        """Halt the channels. Return whether they were not halted before."""
        fresh = not self._words[_HALTED]
        self._words[_HALTED] = 1
        return fresh

    @property
    def is_still(self) -> bool:
        return self._words[_RUNNING] == 0

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.fd)
