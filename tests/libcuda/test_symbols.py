"""The reader of code images finds the symbols of complete images and rejects broken ones."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from libcuda_build.compile import FOLDER
from tests.libcuda.test_validate import DECLARED
from tests.support.images import ELF, LZ4, PTX, ZSTD, elf, fatbin, part
from tests.support.libcudas import PROGRAMS, run
from tests.support.waiting import BUILD_S

pytestmark = pytest.mark.timeout(BUILD_S)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("symbols") / "program"
    command = ["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Werror", f"-I{FOLDER / 'src'}"]
    command += ["-fsanitize=address,undefined", "-fno-sanitize-recover", "-o", str(made)]
    command += [str(PROGRAMS / "symbols.c"), str(FOLDER / "src/exact/symbols.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=BUILD_S)
    return made


def read(program: Path, folder: Path, images: Sequence[bytes]) -> list[str]:
    names = []
    for number, image in enumerate(images):
        path = folder / str(number)
        path.write_bytes(image)
        names.append(str(path))
    # A corrupt size may ask for a gigabyte, which the allocator must refuse.
    environment = {**os.environ, "ASAN_OPTIONS": "allocator_may_return_null=1:max_allocation_size_mb=64"}
    done = run([str(program), *names], environment)
    assert done.returncode == 0, done.stderr
    return [line.strip() for line in done.stdout.splitlines()]


def test_nothing_in_an_image_is_believed(program: Path, tmp_path: Path) -> None:
    plain = elf(["counter", "$str", "__unnamed_1", "other"], undefined=["vprintf"])
    managed = (
        b".visible .global .attribute(.managed) .align 8 .u64 both;\n.global .align 4 .b8 __unnamed_1[4];\n"
    )
    called = b".extern .func  (.param .b64 out) malloc\n(\n.param .b64 a\n)\n;\n"
    images = {
        plain: "counter other",
        elf(["counter"], undefined=["malloc"]): "counter heap",
        DECLARED: "counter",
        managed + called: "both heap",
        b"ld.global.u32 %r1, [counter];\n": "",
        fatbin(part(ELF, 80, elf(["of80"])), part(ELF, 90, plain), part(PTX, 90, DECLARED)): "counter other",
        fatbin(part(ELF, 100, plain), part(PTX, 80, managed)): "both",
        fatbin(part(ELF, 100, plain)): "unread",
        b"\x7fELF": "unread",
    }
    assert read(program, tmp_path, list(images)) == list(images.values())


@pytest.mark.parametrize("how", [ZSTD, LZ4], ids=["zstd", "lz4"])
def test_what_is_packed_is_unpacked(program: Path, tmp_path: Path, how: int) -> None:
    try:
        image = fatbin(part(ELF, 90, elf(["counter", "other"]), how), text=b"")
    except OSError as error:
        pytest.skip(f"no library that packs: {error}")
    assert read(program, tmp_path, [image]) == ["counter other"]
