"""What is given back of a first copy that is left, by a resource manager that a program imitates."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from libcuda_build.compile import FOLDER
from libcuda_build.header import find_include
from tests.support.libcudas import DEADLINE_S, PROGRAMS, run


@pytest.mark.parametrize("sanitize", ["", "address,undefined"])
def test_devices_that_are_there_are_freed_after_uvm_let_go(tmp_path: Path, sanitize: str) -> None:
    # Of what the generator writes the files need nothing but that it is there.
    sizes = "".join(f"#define MPSD_{name} 1\n" for name in ("NAMES", "SPARE", "WRAPPERS"))
    (tmp_path / "functions.h").write_text(f"#include <cuda.h>\n{sizes}")
    program = tmp_path / "program"
    command = ["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Werror", f"-I{tmp_path}"]
    command += [f"-I{FOLDER / 'src'}", "-isystem", str(find_include()), "-o", str(program)]
    command += [f"-fsanitize={sanitize}"] if sanitize else []
    command += [
        str(PROGRAMS / "remains.c"),
        *(str(FOLDER / "src" / n) for n in ("failover/remains.c", "uvm.c")),
    ]
    subprocess.run([*command, "-Wl,--wrap=ioctl", "-lpthread", "-ldl"], check=True, timeout=DEADLINE_S)
    done = run([program], os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
