"""A log disk that can be full: a small tmpfs where the machine allows a mount."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SIZE = 512 << 10


class SmallDisk:
    """A tmpfs of SIZE bytes at `path`. `mounted` is False where mounting is not allowed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.mounted = os.geteuid() == 0 and self._run(
            "mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=0755", "none"
        )

    def _run(self, *command: str) -> bool:
        try:
            done = subprocess.run([*command, str(self.path)], capture_output=True, check=False, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    @property
    def _filler(self) -> Path:
        return self.path / "filler"

    def fill(self) -> None:
        """Use up every free byte."""
        with self._filler.open("wb", buffering=0) as filler:
            for block in (1 << 16, 1 << 12, 1):
                try:
                    while filler.write(bytes(block)) == block:
                        pass
                except OSError:
                    continue

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        if self.mounted and not self._run("umount"):
            # A process that outlived the run still writes there; the mount ends when it has ended.
            self._run("umount", "--lazy")
        self.mounted = False


def disk_can_be_filled(base: Path) -> bool:
    """Try to mount and unmount."""
    disk = SmallDisk(base / "try-disk")
    worked = disk.mounted
    disk.close()
    return worked
