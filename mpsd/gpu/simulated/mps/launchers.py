"""Executables of a simulated node: <dir>/bin/nvidia-cuda-mps-control and -server.

Python scripts that need no environment and few imports, under the names that tools search for.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import mpsd
from mpsd.gpu.simulated import paths

# sh reads the first line as a command, Python as a string: the interpreter's path has no length limit.
_SCRIPT = """#!/bin/sh
'''exec' {python} -IS "$0" "$@"
' '''
import sys
sys.path.insert(0, {root!r})
with open("/proc/self/comm", "w") as comm:
    comm.write("nvidia-cuda-mps")
from mpsd.gpu.simulated.mps.{module} import main
sys.exit(main({directory!r}, sys.argv[1:]))
"""


def write_launchers(directory: str) -> None:
    """Write both scripts and replace old ones atomically. Raises OSError."""
    root = str(Path(mpsd.__file__).resolve().parent.parent)
    os.makedirs(os.path.join(directory, "bin"), exist_ok=True)
    for name, module in ((paths.CONTROL_NAME, "control"), (paths.SERVER_NAME, "server")):
        text = _SCRIPT.format(
            python=shlex.quote(sys.executable), root=root, module=module, directory=os.path.abspath(directory)
        )
        path = paths.launcher(directory, name)
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o755)
        os.replace(temporary, path)
