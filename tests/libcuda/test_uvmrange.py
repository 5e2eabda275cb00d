"""How a range is laid on a real kernel, over devices that stand for the driver's: no driver, no GPU."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from libcuda_build.compile import FOLDER
from libcuda_build.header import find_include
from tests.support.libcudas import DEADLINE_S, PROGRAMS, run

NULL, ZERO = os.makedev(1, 3), os.makedev(1, 5)
"""The one cannot be mapped, the other takes any address as its offset."""


def device(path: Path, number: int) -> None:
    path.parent.mkdir()
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, number)
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        pytest.skip(f"needs a device of its own: {error.strerror}")


@pytest.mark.parametrize("sanitize", ["", "address,undefined"])
def test_managed_ranges_are_laid_and_taken_away(tmp_path: Path, sanitize: str) -> None:
    device(tmp_path / "wrong" / "nvidia-uvm", NULL)
    device(tmp_path / "right" / "nvidia-uvm", ZERO)
    # Of what the generator writes the file needs nothing but that it is there.
    sizes = "".join(f"#define MPSD_{name} 1\n" for name in ("NAMES", "SPARE", "WRAPPERS"))
    (tmp_path / "functions.h").write_text(f"#include <cuda.h>\n{sizes}")
    program = tmp_path / "program"
    command = ["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Werror", f"-I{tmp_path}"]
    command += [f"-I{FOLDER / 'src'}", "-isystem", str(find_include()), "-o", str(program)]
    command += [f"-fsanitize={sanitize}"] if sanitize else []
    sources = (str(FOLDER / "src" / name) for name in ("uvmrange.c", "uvm.c"))
    command += [str(PROGRAMS / "uvmrange.c"), *sources, "-ldl"]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    done = run([program, str(tmp_path)], os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
