"""Contexts whose work runs in their own processes, as the stand-in driver's does: how that comes to an end.

The GPU process and such a process share two words of 32 bits. The first one says that the channels are
halted: nothing begins any more. The second one is how many operations are running. Who begins one counts
it before it looks at the first word, so that 0 seen after a halt means that nothing writes any more.
"""

from __future__ import annotations

import mmap
import os

_HALTED, _RUNNING = 0, 1


class Halt:
    """The words of one context."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("mpsd-simulated-halt", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._map = mmap.mmap(self.fd, mmap.PAGESIZE)
        self._words = memoryview(self._map).cast("I")

    def halt(self) -> bool:
        """Whether it was not halted before."""
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
