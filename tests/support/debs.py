"""Debian packages that single tests need, from the archive that this machine's apt uses, and unpacked."""

from __future__ import annotations

import shutil
import subprocess
import urllib.request
from functools import cache
from pathlib import Path

import pytest

from kmod import aptsources
from kmod.errors import Unavailable
from tests.support.fetched import once

FETCH_S = 20.0


@cache
def unpacked(path: str) -> Path:
    """Return the folder with the files of a package. Skip the test, by its name, if it cannot be had."""
    name = path.rpartition("/")[2]
    if shutil.which("dpkg-deb") is None:
        pytest.skip(f"{name}: no dpkg-deb to unpack it")

    def fetch(into: Path) -> None:
        try:
            archive = aptsources.debian(aptsources.read()).uris[0].rstrip("/")
            with urllib.request.urlopen(f"{archive}/pool/main/{path}", timeout=FETCH_S) as answer:
                (into / name).write_bytes(answer.read())
        except (OSError, Unavailable) as error:
            pytest.skip(f"{name}: cannot be fetched: {error}")
        subprocess.run(["dpkg-deb", "-x", into / name, into / "files"], check=True, timeout=FETCH_S)

    return once(name.removesuffix(".deb"), fetch)
