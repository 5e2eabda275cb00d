"""Skip these tests with a reason on a machine without a C compiler."""

from __future__ import annotations

import shutil

import pytest

from tests.support.libcudas import Libraries, session_libraries


@pytest.fixture(scope="session", autouse=True)
def _compiler() -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc: the libcuda proxy cannot be built here")


@pytest.fixture(scope="session")
def libraries(_compiler: None, tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    return session_libraries(tmp_path_factory)
