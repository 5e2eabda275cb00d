"""The simulated GPU resets a server's channels as a real GPU does.

After the line in the kernel log no kernel of that server's clients writes, although the clients learn of
it later. The daemon's message FENCED relies on that.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mpsd.gpu.base import Backend
from mpsd.gpu.simulated import paths
from tests.support.libcudas import DEADLINE_S, Libraries
from tests.support.simfixtures import backend, domain
from tests.support.simnode import Client, Domain

__all__ = ["backend", "domain"]

# Add to a word until the context is lost; print the word at the log line and at the end.
PROGRAM = """
import ctypes, sys, threading
cuda = ctypes.CDLL("libcuda.so.1")
def new(function, *arguments):
    made = ctypes.c_void_p()
    assert function(ctypes.byref(made), *arguments) == 0
    return made
assert cuda.cuInit(0) == 0
cuda.cuCtxSetCurrent(context := new(cuda.cuDevicePrimaryCtxRetain, 0))
module = new(cuda.cuModuleLoadData, b"standin module\\nkernel add add 0\\n")
add = new(cuda.cuModuleGetFunction, module, b"add")
word = ctypes.cast(new(cuda.cuMemAllocHost_v2, ctypes.c_size_t(4)), ctypes.POINTER(ctypes.c_uint32))
values = ctypes.c_uint64(ctypes.addressof(word.contents)), ctypes.c_uint64(1), ctypes.c_uint32(1)
arguments = (ctypes.c_void_p * 3)(*map(ctypes.addressof, values))
def work():
    cuda.cuCtxSetCurrent(context)
    while cuda.cuLaunchKernel(add, 1, 1, 1, 1, 1, 1, 0, None, arguments, None) == 0:
        if cuda.cuCtxSynchronize():
            break
        begun.set()
begun = threading.Event()
thread = threading.Thread(target=work)
thread.start()
begun.wait()
print("begun", flush=True)
with open(sys.argv[1]) as log:
    while ": 43, " not in log.readline():
        pass
at_reset = word[0]
thread.join()
print(cuda.cuCtxSynchronize(), word[0] - at_reset, flush=True)
cuda.cuDevicePrimaryCtxReset_v2(0)
"""


def test_nothing_writes_after_the_line_of_the_reset(
    backend: Backend, domain: Domain, libraries: Libraries, tmp_path: Path
) -> None:
    node = backend.control_environment["MPSD_SIM_DIR"]
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {
        **libraries.environment(proxied=False),
        **domain.environment,
        "MPSD_SIM_DIR": node,
        "MPSD_STANDIN_GPU": "simulated",
    }
    command = [sys.executable, str(script), paths.kernel_log(node)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "begun\n"
            offender: Client = domain.client().ready()
            offender.ask('dev.launch("trap")')
            said, _ = program.communicate(timeout=DEADLINE_S)
        finally:
            program.kill()
    assert said == "719 0\n"
    assert program.returncode == 0
