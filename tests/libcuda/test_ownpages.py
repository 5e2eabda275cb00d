"""Pages that an old driver instance shares with the GPU become private pages of the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.libcudas import run, standalone


@pytest.mark.parametrize("sanitize", ["", "address,undefined"])
def test_pages_of_one_copy_alone_are_exchanged_and_hold_what_they_held(tmp_path: Path, sanitize: str) -> None:
    sources = ("failover/ownpages.c", "failover/owned.c")
    program = standalone(tmp_path, "ownpages", sources, "-Wl,--wrap=fopen", sanitize=sanitize)
    done = run([program], os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
