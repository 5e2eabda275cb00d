"""Memory that a program maps itself, for programs that a test moves while they run."""

from __future__ import annotations

from faultinject.programs.devices.instance import Driver


class Segment:
    """An address range mapped segment by segment; the buffer's words are in the first two segments."""

    PIECE, MOST = 2 << 20, 4

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.base = driver.reserve(self.MOST * self.PIECE)
        self.handles: list[int] = []
        self.grow()
        self.grow()
        self.buffer = self.base + self.PIECE - 12

    def grow(self) -> None:
        handle = self._driver.create()
        self._driver.map(self.base + len(self.handles) * self.PIECE, handle)
        self.handles.append(handle)

    def swap(self) -> None:
        """Replace the second segment by one of zeros, which begins at the buffer's fourth word."""
        address = self.base + self.PIECE
        self._driver.unmap(address, self.handles[1])
        self.handles[1] = self._driver.create()
        self._driver.map(address, self.handles[1])
        self._driver("cuMemsetD8_v2", address, 0, self.PIECE)

    def end(self) -> None:
        self._driver("cuMemUnmap", self.base, len(self.handles) * self.PIECE)
        for handle in self.handles:
            self._driver("cuMemRelease", handle)
        self._driver("cuMemAddressFree", self.base, self.MOST * self.PIECE)
