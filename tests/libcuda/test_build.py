"""The generator rejects broken tables and produces the same sources twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from libcuda_build.carry import ASKED_OFTEN
from libcuda_build.compile import FOLDER, BuildError, build_proxy, build_standin
from libcuda_build.emit import SPARE_NAME_ROOM, spare_name, write_sources
from libcuda_build.header import Function, HeaderError, find_include, read_functions, version_of
from libcuda_build.table import Plan, TableError, read_plan
from tests.support.libcudas import run
from tests.support.long import only_long
from tests.support.waiting import BUILD_S

pytestmark = pytest.mark.timeout(BUILD_S)


@pytest.fixture(scope="module")
def functions() -> dict[str, Function]:
    return read_functions(find_include())


def test_all_versions_of_a_function_are_read(functions: dict[str, Function]) -> None:
    assert len(functions) > 600
    for name in ("cuMemAlloc", "cuMemAlloc_v2", "cuMemcpyHtoD_v2_ptds", "cuLaunchKernel_ptsz", "cuInit"):
        assert name in functions
    assert functions["cuCtxSynchronize"].parameters == ()
    assert functions["cuGetExportTable"].parameters == (
        "const void **ppExportTable",
        "const CUuuid *pExportTableId",
    )


def test_the_plan_is_sorted_and_whole(functions: dict[str, Function]) -> None:
    plan = read_plan(FOLDER, functions)
    assert list(plan.names) == sorted({*functions, "cuGLInit", *plan.names})
    assert {"cuInit", "cuGetProcAddress", "cuGetProcAddress_v2", "cuGetExportTable"} <= set(plan.wrapped)
    assert set(plan.wrapped) <= set(plan.called) <= set(functions)
    # The proxy calls these on the original driver instance, bypassing wrappers.
    asked = {one.function.name for one in plan.carried if one.does == "ask" and not one.settles}
    assert set(ASKED_OFTEN) <= asked - set(plan.wrapped)


@pytest.mark.parametrize(
    "table, names, complaint",
    [
        ('[cuInit]\nwrap = "always"\n', "", "takes the keys wrap and why"),
        ('[cuInit]\nwrap = "often"\nwhy = "x"\n', "", "always, memory, never"),
        ('[cuNone]\nwrap = "always"\nwhy = "x"\n', "", "does not declare cuNone"),
        ("", "malloc\n", "not names of driver functions: malloc"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, table: str, names: str, complaint: str) -> None:
    (tmp_path / "functions.toml").write_text(table)
    (tmp_path / "names.txt").write_text(names)
    with pytest.raises(TableError, match=complaint):
        read_plan(tmp_path, {"cuInit": Function("cuInit", ("unsigned int Flags",))})


def test_the_sources_are_the_same_each_time(tmp_path: Path) -> None:
    function = Function("cuInit", ("unsigned int Flags",))
    plan = Plan(("cuGLInit", "cuInit"), ("cuInit",), {"cuInit": "always"}, {"cuInit": function})
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_sources(plan, tmp_path / name)
    for file in ("stubs.S", "names.c", "functions.h"):
        assert (tmp_path / "one" / file).read_text() == (tmp_path / "two" / file).read_text()
    written = (tmp_path / "one" / "functions.h").read_text()
    assert "#define MPSD_cuInit 1" in written
    assert "CUresult wrap_cuInit(unsigned int Flags);" in written


def test_spare_names_are_as_long_as_they_may_be() -> None:
    assert {len(spare_name(number)) for number in (0, 9, 127)} == {SPARE_NAME_ROOM - 1}


def test_a_header_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeaderError, match="cannot read"):
        read_functions(tmp_path)
    (tmp_path / "cuda.h").write_text("int cuInit(unsigned int flags);\n")
    with pytest.raises(HeaderError, match="does not return a CUresult"):
        read_functions(tmp_path)
    with pytest.raises(HeaderError, match="no CUDA_VERSION"):
        version_of(tmp_path / "cuda.h")
    with pytest.raises(BuildError, match="gcc"):
        build_standin(tmp_path / "out", include=tmp_path)


def test_a_compiler_that_warns_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build accepts a user's compiler that emits extra warnings; the tests' own build treats them as
    errors."""
    compiler = tmp_path / "gcc"
    compiler.write_text('#!/bin/sh\nexec gcc -Wpadded "$@" -O0 -g0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert build_standin(tmp_path / "out").exists()
    with pytest.raises(BuildError, match="Werror=padded"):
        build_standin(tmp_path / "out", strict=True)


@only_long
def test_a_compiler_that_cannot_compile_it_as_one_compiles_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, calls = tmp_path / "cc", tmp_path / "calls"
    compiler.write_text(
        f'#!/bin/sh\necho "$*" >> {calls}\ncase " $*" in *" -flto"*) exit 1 ;; esac\nexec gcc "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert build_proxy(tmp_path / "out").exists()
    assert sum("-flto" in line for line in calls.read_text().splitlines()) == 1


def test_no_string_lacks_its_final_zero(tmp_path: Path) -> None:
    """No string literal lacks its final zero. gcc 15 warns of that with -Wextra; older versions need
    -Wc++-compat."""
    include = ["-I", str(tmp_path), "-I", str(FOLDER / "src"), "-I", str(FOLDER / "standin")]
    write_sources(read_plan(FOLDER, read_functions(find_include())), tmp_path)
    files = [str(path) for folder in ("src", "standin") for path in (FOLDER / folder).rglob("*.c")]
    command = ["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-fsyntax-only", "-Wc++-compat", *include]
    done = run([*command, "-isystem", str(find_include()), *files], os.environ, deadline_s=BUILD_S)
    assert done.returncode == 0 and "initializer-string" not in done.stderr


def test_c_files_are_short() -> None:
    """No C file has more than 600 lines, so that it can be read in one go."""
    sizes = {
        str(path.relative_to(FOLDER)): path.read_text().count("\n")
        for pattern in ("src/**/*.[ch]", "standin/*.[ch]")
        for path in FOLDER.glob(pattern)
    }
    assert not {name: size for name, size in sizes.items() if size > 600}
