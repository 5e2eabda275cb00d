"""Report files: reading them, and writing them as JSON and as Markdown under their standard names."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from faultinject.evidence.revision import UNKNOWN
from mpsd.base.errors import StoreError, UsageError


def tell_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def read(path: Path) -> Any:
    """Return the JSON in this file. Raises UsageError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the report {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error


def is_of_kind(data: Any, kind: str) -> bool:
    return isinstance(data, dict) and data.get("kind") == kind


def load_of_kind(
    data: Any, kind: str, path: Path, problems: Callable[[Mapping[str, Any]], Iterator[str]]
) -> dict[str, Any] | None:
    """Return a report of this kind; None for anything else. Raises UsageError with its first problem."""
    if not is_of_kind(data, kind):
        return None
    data = {"revision": UNKNOWN, **data}
    try:
        problem = next(problems(data), None)
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"its form is not that of {kind}: {error!r}"
    if problem:
        raise UsageError(f"{path} is no report of this program: {problem}")
    return dict(data)


def file_name(device: str, driver: str, what: str, suffix: str = "json") -> str:
    """Return DEVICE-DRIVER-WHAT.suffix without characters that a shell treats specially."""
    parts = (re.sub(r"[^A-Za-z0-9.]+", "-", p).strip("-") for p in (device, driver, what))
    return "-".join(parts) + f".{suffix}"


def target_path(path: Path, report: Mapping[str, Any], what: str, suffix: str) -> Path:
    """Return `path`, or the standard name in it where it is a directory."""
    if not path.is_dir():
        return path
    return path / file_name(report["device"], report["driver"], what, suffix)


def text_of(report: Mapping[str, Any]) -> str:
    """Return a report as it is written to a file."""
    return json.dumps(report, indent=1) + "\n"


def digest_line(raw: bytes) -> str:
    """Return the line of a Markdown page that names the raw report."""
    return f"\nSHA-256 of the raw report: `{hashlib.sha256(raw).hexdigest()}`\n"


def deliver(
    report: Mapping[str, Any],
    what: str,
    json_path: Path | None,
    markdown_path: Path | None,
    markdown: str,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Write a report as JSON and as Markdown, where paths are given, under its standard name in a directory.

    `tell` is called with each file that was written. Raises StoreError, which names the file.
    """
    raw = text_of(report)
    for path, suffix, text in (
        (json_path, "json", raw),
        (markdown_path, "md", markdown + digest_line(raw.encode())),
    ):
        if path is not None:
            target = target_path(path, report, what, suffix)
            write_text(target, text)
            tell(f"wrote {target}")


def check_target(path: Path | None, option: str) -> None:
    """Check before hours of runs that a report can be written there. Raises UsageError. Creates nothing."""
    if path is None:
        return
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {folder}", remedy="make it first")
    target = path if path.exists() else folder
    if not os.access(target, os.W_OK | (os.X_OK if target.is_dir() else 0)):
        raise UsageError(f"{option} {path}: {target} may not be written", remedy="choose another place")


def save(report: Mapping[str, Any], path: Path) -> None:
    write_text(path, text_of(report))


def write_text(path: Path, text: str) -> None:
    """Raises StoreError, which names the file."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}", remedy="choose another place") from error
