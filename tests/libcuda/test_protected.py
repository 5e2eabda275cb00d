"""Programs behind the proxy, started by mpsd-run and by `eval "$(mpsd-ctl env)"`: status says what they have.

The driver is the stand-in on the simulated GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mpsd.api.protectionview import LOST_PROXY, PLAIN
from tests.support.libcudas import DEADLINE_S, MPSD_RUN, PATHS, Libraries
from tests.support.site import Site, Status

PROGRAM = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
codes = [cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
         cuda.cuCtxSetCurrent(context), cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20))]
print(codes, flush=True)
sys.stdin.read()
"""
BY_EVAL = ["sh", "-c", 'eval "$("$0" -m mpsd.ctl env -q)" && exec "$@"', sys.executable]


@pytest.fixture(scope="module")
def site(libraries: Libraries) -> Iterator[Site]:
    driver = f'"{libraries.real}"'
    with Site(protect='"failover"', failover__driver=driver) as started:
        yield started.start()


@contextmanager
def client(
    site: Site, libraries: Libraries, script: Path, through: list[str], **environ: str
) -> Iterator[int]:
    """Run the program through a command that becomes it; yield its pid."""
    given = {
        **libraries.environment(proxied=False),
        "PYTHONPATH": PATHS,
        "MPSD_SOCKET": site.socket,
        "MPSD_LIBCUDA_DIR": str(libraries.proxy),
        "MPSD_STANDIN_GPU": "simulated",
        **environ,
    }
    command = [*through, sys.executable, str(script)]
    with subprocess.Popen(command, env=given, stdin=-1, stdout=-1, text=True) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == "[0, 0, 0, 0]\n"
            yield process.pid
            process.stdin.close()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


def test_status_calls_each_program_what_it_is(site: Site, libraries: Libraries, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    reset = ["env", f"LD_LIBRARY_PATH={libraries.standin}"]
    joined = site.client_environ()["CUDA_MPS_PIPE_DIRECTORY"]
    ways: list[tuple[list[str], dict[str, str], tuple[str, str]]] = [
        ([*MPSD_RUN, "-q"], {}, ("failover", "")),
        (BY_EVAL, {}, ("failover", "")),
        ([*MPSD_RUN, "-q", "--protect", "guard"], {}, ("guard", "started at level guard")),
        ([*MPSD_RUN, "-q", "--protect", "observe"], {}, ("observe", "started at level observe")),
        ([*MPSD_RUN, "-q", *reset], {}, ("observe", LOST_PROXY)),
        ([], {"CUDA_MPS_PIPE_DIRECTORY": joined}, ("observe", PLAIN)),
    ]
    with ExitStack() as running:
        expected = {}
        for through, environ, protected in ways:
            started = client(site, libraries, tmp_path / "program.py", through, **environ)
            expected[running.enter_context(started)] = protected

        def seen(status: Status) -> bool:
            rows = [(c["pid"], c["protected"]) for c in status["clients"]]
            found = {pid: (row["level"], row["why"]) for pid, row in rows if pid in expected}
            return found == expected

        site.until(seen, f"status shows {expected}")
