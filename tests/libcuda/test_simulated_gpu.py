"""A C driver program under a real mpsd on the simulated GPU: its fault is seen and attributed, and a
neighbour is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.libcudas import DEADLINE_S, MPSD_RUN, ROOT, Libraries
from tests.support.site import Site, Status, until

PROGRAM = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, module, store = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
codes = [cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
         cuda.cuCtxSetCurrent(context),
         cuda.cuModuleLoadData(ctypes.byref(module), b"standin module\\nkernel store store 0\\n"),
         cuda.cuModuleGetFunction(ctypes.byref(store), module, b"store"), cuda.cuCtxSynchronize()]
print(codes, flush=True)
for line in sys.stdin:
    if line.strip() == "stray":
        address, value = ctypes.c_uint64(0x7e0000000000), ctypes.c_uint32(1)
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(value))
        cuda.cuLaunchKernel(store, 1, 1, 1, 1, 1, 1, 0, None, arguments, None)
    print(cuda.cuCtxSynchronize(), flush=True)
cuda.cuDevicePrimaryCtxReset_v2(0)
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site() as started:
        yield started.start()


Tell = Callable[[str], str]


@contextmanager
def client(site: Site, libraries: Libraries, script: Path) -> Iterator[tuple[int, Tell]]:
    """Run the program; yield its pid and a function that sends it a command and returns cuCtxSynchronize's
    code."""
    script.write_text(PROGRAM)
    environment = {
        **libraries.environment(proxied=False, vault="1"),
        "PYTHONPATH": f"{ROOT / 'clients'}:{ROOT}",
        "MPSD_SOCKET": site.socket,
        "MPSD_LIBCUDA_DIR": str(libraries.proxy),
        "MPSD_STANDIN_GPU": "simulated",
    }
    command = [*MPSD_RUN, sys.executable, str(script)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            stdin, stdout = process.stdin, process.stdout
            assert stdout.readline() == "[0, 0, 0, 0, 0, 0]\n"

            def tell(what: str) -> str:
                stdin.write(what + "\n")
                stdin.flush()
                return stdout.readline().strip()

            yield process.pid, tell
            stdin.close()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


def attached(site: Site, *pids: int) -> None:
    def holds(status: Status) -> bool:
        return set(pids) <= {c["pid"] for c in status["clients"] if c["state"] == "attached"}

    site.until(holds, f"{pids} attached")


def test_a_stray_store_is_pinned_on_the_program_that_made_it(
    site: Site, libraries: Libraries, tmp_path: Path
) -> None:
    with client(site, libraries, tmp_path / "a.py") as (offender, stray):
        with client(site, libraries, tmp_path / "b.py") as (neighbour, look):
            attached(site, offender, neighbour)
            assert look("look") == "0"
            assert stray("stray") == "700"
            # The neighbour gets the fault when the GPU has handled it.
            until(lambda: look("look") == "700", "the neighbour has its error")
        record = site.until_fault("mmu-invalid-address")
    assert (record["offender"]["pid"], record["confidence"]) == (offender, "certain")
    assert (record["address"], record["access"]) == ("0x7e0000000000", "write")
