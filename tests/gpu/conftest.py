"""Whole programs under a whole mpsd, on the simulated GPU, and on the real one if MPSD_TEST_GPU allows it.

See tests/conftest.py. The proxy is that of MPSD_LIBCUDA_DIR, an installed one, or built here.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from faultinject.registry.history import History
from faultinject.rig.libraries import Libraries, find_libraries
from faultinject.rig.node import Node, open_node, open_simulated_node
from faultinject.rig.rig import Rig
from mpsd.base.errors import MpsdError
from tests.support.libcudas import session_libraries

BACKENDS = ("simulated", pytest.param("nvidia", marks=pytest.mark.gpu))


@pytest.fixture(scope="session")
def base() -> Iterator[Path]:
    # Short, for socket paths must fit in 107 bytes.
    with tempfile.TemporaryDirectory(prefix="mpsd-gt-", dir="/tmp") as where:
        yield Path(where)


@pytest.fixture(scope="session", params=BACKENDS)
def node(request: pytest.FixtureRequest, base: Path) -> Iterator[Node]:
    with warnings.catch_warnings():
        # Warnings of CUDA's Python binding are not ours to fix.
        warnings.simplefilter("ignore")
        simulated = request.param == "simulated"
        where = base / request.param
        opened = open_simulated_node(where, gpus=2) if simulated else open_node(request.param, where)
    yield opened
    opened.close()


@pytest.fixture
def gpus(node: Node) -> list[str]:
    """UUIDs of two GPUs."""
    found = [gpu.uuid for gpu in node.backend.devices.gpus()]
    if len(found) < 2:
        pytest.skip(f"needs two GPUs, and there are fewer: {len(found)}")
    return found[:2]


@pytest.fixture(scope="session")
def libraries(node: Node, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    named = os.environ.get("MPSD_LIBCUDA_DIR")
    if node.name == "simulated" and not named and shutil.which("gcc"):
        return session_libraries(tmp_path_factory).for_harness()
    try:
        return find_libraries(node.name, Path(named) if named else None, None, base / "lib")
    except MpsdError as error:
        pytest.skip(str(error))


@pytest.fixture
def rig(node: Node) -> Iterator[Rig]:
    """A daemon with the vault on. No process of the run may be left."""
    with History() as history, Rig(node, "mpsd", history, settings={"protect": '"guard"'}) as started:
        yield started
    assert started.leftovers == []
