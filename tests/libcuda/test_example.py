"""clients/examples/counting.py counts on the stand-in driver, through the proxy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.libcudas import DEADLINE_S, ROOT, Libraries

COUNTING = ROOT / "clients" / "examples" / "counting.py"


@pytest.mark.parametrize("proxied", [False, True])
def test_it_counts_lines(libraries: Libraries, proxied: bool) -> None:
    done = subprocess.run(
        [sys.executable, COUNTING],
        env=libraries.environment(proxied=proxied),
        input="\n\n\n",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("1\n2\n3\n", "", 0)
