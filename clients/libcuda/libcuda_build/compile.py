"""Compilation of the generated sources and the proxy's own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from libcuda_build.emit import write_sources
from libcuda_build.header import HeaderError, find_include, read_functions
from libcuda_build.table import TableError, read_plan

FOLDER = Path(__file__).resolve().parent.parent
JOBS = 8
"""Compilers at a time, whatever the number of processors: a container may be limited to a few."""
_WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wmissing-prototypes")
_CODE = (
    "-std=gnu11",
    "-D_GNU_SOURCE",
    "-O2",
    "-g",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-plt",
    "-fno-semantic-interposition",
)
# sysv: exports.c edits this type of hash table.
_LINK = (
    "-shared",
    "-Wl,-soname,libcuda.so.1",
    "-Wl,-z,relro,-z,now,-z,separate-code",
    "-Wl,--hash-style=sysv",
    "-Wl,-Bsymbolic",
    "-Wl,--no-undefined",
)
# Without the version script the linker would also export its own section markers.
_EXPORTS = "{ global: cu*; local: *; };\n"
# Sources of the proxy that the stand-in driver is built with too.
_SHARED = ("elfview.c",)
# Programs keep pointers to the stubs, so the proxy is never unloaded. The stand-in driver can be.
_STAYS = "-Wl,-z,nodelete"


class BuildError(Exception):
    """A tool is missing, or the compiler reported an error."""


def build_proxy(out: Path, *, sanitize: str = "", include: Path | None = None, strict: bool = False) -> Path:
    """Build out/libcuda.so.1, and libcuda.so beside it. Raises BuildError; `strict`: for warnings too.

    Without `strict`, because another compiler or cuda.h may warn where none did at development time.
    """
    with tempfile.TemporaryDirectory(prefix="mpsd-libcuda-") as made:
        generated = Path(made)
        try:
            headers = include or find_include()
            write_sources(read_plan(FOLDER, read_functions(headers, _compiler())), generated)
        except (HeaderError, TableError) as error:
            raise BuildError(str(error)) from error
        folders = (generated, FOLDER / "src")
        sources = sorted((FOLDER / "src").rglob("*.c"))
        sources += [generated / name for name in ("names.c", "carry.c", "stubs.S", "thunks.S")]
        together = () if sanitize else _together(generated)
        exports = generated / "exports.map"
        exports.write_text(_EXPORTS, encoding="utf-8")
        more = (_STAYS, f"-Wl,--version-script={exports}")
        return _library(out, sources, folders, headers, sanitize, strict, more, together)


def build_standin(
    out: Path, *, sanitize: str = "", include: Path | None = None, strict: bool = False
) -> Path:
    """Build the stand-in driver as out/libcuda.so.1. Raises BuildError; `strict`: for warnings too."""
    try:
        headers = include or find_include()
    except HeaderError as error:
        raise BuildError(str(error)) from error
    source, shared = FOLDER / "standin", FOLDER / "src"
    sources = [*sorted(source.glob("*.c")), *(shared / name for name in _SHARED)]
    return _library(out, sources, (source, shared), headers, sanitize, strict)


def _library(
    out: Path,
    sources: Sequence[Path],
    folders: Sequence[Path],
    headers: Path,
    sanitize: str,
    strict: bool,
    more: Sequence[str] = (),
    together: Sequence[str] = (),
) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    target = out / "libcuda.so.1"
    # Build beside the old file and rename: a process that has the old one mapped keeps it.
    fresh = out / ".libcuda.so.1.new"
    command = [_compiler(), *_CODE, *_WARNINGS, *(f"-I{folder}" for folder in folders), f"-isystem{headers}"]
    command += [*together, *(["-Werror"] if strict else [])]
    link = [*_LINK, *more]
    if sanitize:
        # The program itself links the sanitizer's runtime. Its reports need line numbers alone: -g1.
        command += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
        command += ["-O1", "-g1"]
        link.remove("-Wl,--no-undefined")
    with tempfile.TemporaryDirectory(prefix="mpsd-objects-") as made:
        objects = _objects(command, sources, Path(made))
        _run([*command, *link, "-o", str(fresh), *map(str, objects), "-ldl", "-lpthread"])
    fresh.rename(target)
    _second_name(out)
    return target


def _together(folder: Path) -> tuple[str, ...]:
    """Return the speed option if the compiler and the linker support it in this form."""
    options = (f"-flto={_jobs()}",)
    source, target = folder / "together.c", folder / "together.so"
    source.write_text("int together(void);\nint together(void) { return 0; }\n", encoding="utf-8")
    try:
        _run([_compiler(), "-shared", "-fPIC", *options, "-o", str(target), str(source)])
    except BuildError:
        return ()
    return options


def _jobs() -> int:
    return min(JOBS, len(os.sched_getaffinity(0)))


def _objects(command: Sequence[str], sources: Sequence[Path], folder: Path) -> list[Path]:
    """Compile the sources, some at a time. Raises BuildError for the first that fails."""
    objects = [folder / f"{number}.o" for number in range(len(sources))]
    with ThreadPoolExecutor(_jobs()) as pool:
        pairs = zip(sources, objects, strict=True)
        made = [pool.submit(_run, [*command, "-c", "-o", str(to), str(of)]) for of, to in pairs]
        try:
            for one in made:
                one.result()
        finally:
            pool.shutdown(cancel_futures=True)
    return objects


def _second_name(out: Path) -> None:
    """Write libcuda.so for programs that open that name: an empty library that needs libcuda.so.1.

    A wheel cannot contain a link, and a copy would be a second proxy.
    """
    target, fresh = out / "libcuda.so", out / ".libcuda.so.new"
    link = ["-shared", "-Wl,-soname,mpsd-libcuda.so", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed"]
    _run(
        [
            _compiler(),
            *link,
            "-x",
            "c",
            "/dev/null",
            "-x",
            "none",
            str(out / "libcuda.so.1"),
            "-o",
            str(fresh),
        ]
    )
    fresh.rename(target)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()}")


def _compiler() -> str:
    return os.environ.get("CC", "gcc")
