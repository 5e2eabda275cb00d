"""Consumers take buffers over as DLPack tensors and CUDA arrays, on the stand-in driver.

PyTorch and CuPy themselves need a GPU, so ctypes plays the consumer.
"""

from __future__ import annotations

import sys

import pytest

from tests.support.libcudas import PROGRAMS, ROOT, Libraries, run


@pytest.mark.parametrize(
    "what", ["unversioned", "versioned", "lifetime", "errors", "arrays", "refusals", "streams", "at_the_end"]
)
@pytest.mark.parametrize("proxied", [False, True])
def test_a_consumer(libraries: Libraries, what: str, proxied: bool) -> None:
    environment = libraries.environment(
        proxied=proxied, PYTHONPATH=f"{ROOT / 'clients'}:{ROOT}", MPSD_SOCKET="/nonexistent/mpsd.sock"
    )
    done = run([sys.executable, PROGRAMS / "arrays.py", what], environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "done\n" + ("deleted\n" if what == "at_the_end" else "")
