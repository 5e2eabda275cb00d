"""One small JSON file that survives every death: the state that a new daemon needs to adopt its domains.

Written whole: to a temporary file that is renamed over the old one. A reader sees the old state or the new
one, never a mixture. That is enough for every death of the process. For a loss of power `sync` also flushes
the file to disk, which can take long and so is not part of `save`. The file carries a kind, a level (the
version of its contents) and a checksum. A higher level is refused and the file left as it is.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpsd.base.errors import StoreError


class StateFile:
    """The file. `problem` says why it is not up to date (full disk, no rights); None when it is.

    Such a state is kept in memory and written by the next `save` or `retry`. No method raises OSError.
    """

    def __init__(self, path: str | Path, kind: str, level: int) -> None:
        self.path = Path(path)
        self.kind = kind
        self.level = level
        self.problem: str | None = None
        self._waiting: Mapping[str, object] | None = None
        self._unflushed = False

    def load(self) -> dict[str, Any] | None:
        """Return the state, or None when there is none.

        A damaged file is renamed to NAME.damaged and reported in `problem`. Raises StoreError for a higher
        level, for a file of another kind, or when the file cannot be read.
        """
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(
                f"cannot read {self.path}: {error.strerror}", remedy="check its owner and mode"
            ) from error
        try:
            return self._decode(text)
        except ValueError as error:
            aside = set_aside(self.path, "damaged")
            self.problem = f"{self.path} is damaged ({error}); kept as {aside}"
            return None

    def save(self, state: Mapping[str, object]) -> bool:
        """Replace the state; return False on failure, with the reason in `problem`."""
        self._waiting = state
        return self.retry()

    def retry(self) -> bool:
        """Write a state that could not be written; return True when none waits any more."""
        if self._waiting is None:
            return True
        try:
            replace_file(self.path, self._encode(self._waiting))
        except OSError as error:
            self.problem = f"cannot write {self.path}: {error.strerror}"
            return False
        self._waiting = None
        self._unflushed = True
        self.problem = None
        return True

    def sync(self) -> None:
        """Flush the last state to disk, from any thread; see `problem`."""
        if not self._unflushed:
            return
        self._unflushed = False
        try:
            sync_file(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            self.problem = f"cannot flush {self.path}: {error.strerror}"

    def _encode(self, state: Mapping[str, object]) -> bytes:
        body = json.dumps(state, separators=(",", ":"))
        head = {"kind": self.kind, "level": self.level, "crc32": zlib.crc32(body.encode())}
        return f"{json.dumps(head)}\n{body}\n".encode()

    def _decode(self, text: bytes) -> dict[str, Any]:
        head_line, _, body = text.partition(b"\n")
        head = json.loads(head_line)
        if not isinstance(head, dict) or not isinstance(head.get("level"), int):
            raise ValueError("no level")
        check_level(self.path, head, self.kind, self.level)
        if not body.endswith(b"\n") or head.get("crc32") != zlib.crc32(body[:-1]):
            raise ValueError("checksum")
        state = json.loads(body)
        if not isinstance(state, dict):
            raise ValueError("not an object")
        return state


def check_level(path: Path, head: Mapping[str, Any], kind: str, level: int) -> None:
    """Check the head. Raises StoreError unless it is of this kind and of a known level."""
    if head.get("kind") != kind:
        raise StoreError(f"{path} holds {head.get('kind')!r}, not {kind!r}", remedy="move it away")
    if head["level"] > level:
        raise StoreError(
            f"{path} was written by a newer mpsd (level {head['level']}, this one knows {level})",
            remedy="run that version again, or move the file away to start without it",
        )


def replace_file(path: Path, content: bytes) -> None:
    """Write the file whole, mode 0600. Raises OSError; the old content stays then."""
    temporary = path.with_name(path.name + ".new")
    path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_all(fd, content)
    except OSError:
        os.unlink(temporary)
        raise
    finally:
        os.close(fd)
    os.replace(temporary, path)


def sync_file(path: Path) -> None:
    """Flush a file and its name to disk: fsync(2) of it and of its directory. Raises OSError."""
    for name, flags in ((path, 0), (path.parent, os.O_DIRECTORY)):
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def set_aside(path: Path, why: str) -> Path:
    """Rename to NAME.why, or NAME.why.N when that is taken. Raises OSError."""
    aside = path.with_name(f"{path.name}.{why}")
    number = 0
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.{why}.{number}")
    path.rename(aside)
    return aside
