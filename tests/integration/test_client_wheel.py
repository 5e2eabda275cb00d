"""The client library as users install it: a wheel without dependencies, in an empty environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpsd
from tests.support.listening import DEADLINE_S, RunningListener

CLIENTS = Path(__file__).resolve().parents[2] / "clients"
USE_IT = """
import json, sys
import mpsd_client
with mpsd_client.connect(sys.argv[1]) as client:
    answer = client.version()
    try:
        client.kill(99)
    except mpsd_client.NotFoundError as error:
        refused = error.code
foreign = {m.split(".")[0] for m in sys.modules} - set(sys.stdlib_module_names) - {"mpsd_client"}
print(json.dumps([answer["pid"], refused, sorted(foreign), mpsd_client.__file__]))
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    """Return the wheel or sdist of a source tree, made by the tree's own build backend."""
    code = f"import sys; from hatchling.build import build_{kind}; print(build_{kind}(sys.argv[1]))"
    return target / run(sys.executable, "-c", code, target, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", CLIENTS, tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def socket_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mpsd-test-") as where:
        yield Path(where) / "mpsd.sock"


def test_the_wheel_works_where_nothing_else_is_installed(
    wheel: Path, tmp_path: Path, socket_path: Path
) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python),
        *("install", "--no-deps", "--no-index", wheel),
    )
    with RunningListener(socket_path):
        said = subprocess.run(
            [python, "-I", "-c", USE_IT, socket_path],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            cwd=tmp_path,
        )
    assert said.returncode == 0, said.stderr
    pid, refused, foreign, where = json.loads(said.stdout)
    assert pid > 0 and refused == "not-found"
    assert [name for name in foreign if name.startswith("mpsd")] == []
    assert Path(where).is_relative_to(tmp_path)


def test_the_wheel_carries_the_protocol_and_asks_for_nothing(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(archive.read(n).decode() for n in names if n.endswith("METADATA"))
    here = {f"mpsd_client/_wire/{p.name}" for p in (CLIENTS.parent / "mpsd" / "wire").glob("*.py")}
    assert here <= names and {"mpsd_client/_errors.py", "mpsd_client/py.typed"} <= names
    assert "Requires-Dist" not in metadata
    assert f"Version: {mpsd.__version__}\n" in metadata


def test_a_wheel_can_be_built_from_the_sdist(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", CLIENTS, tmp_path)
    with tarfile.open(sdist) as archive:
        # Python 3.11 has filters from 3.11.4 on; Debian 12's is older.
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path / "unpacked", **safe)
    (source,) = (tmp_path / "unpacked").iterdir()
    again = build("wheel", source, tmp_path)

    def contents(path: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(path) as archive:
            return {n: archive.read(n) for n in archive.namelist() if n.startswith("mpsd_client/")}

    assert contents(again) == contents(wheel)


def test_building_leaves_nothing_in_the_source_tree(wheel: Path) -> None:
    assert not (CLIENTS / "mpsd_client" / "_wire").exists()
    assert not (CLIENTS / "dist").exists()
    assert tomllib.loads((CLIENTS / "pyproject.toml").read_text())["project"]["dependencies"] == []
    assert os.listdir(wheel.parent) == [wheel.name]
