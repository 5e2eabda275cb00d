"""Tests marked `gpu` need a real GPU. MPSD_TEST_GPU decides: 1 they must run, 0 they are skipped, unset they
run where this machine looks fit and say otherwise why not."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
from hypothesis import settings

# The same examples each time: what fails once fails for everybody.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

DEVICE_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
BUILD_S = 300.0
"""For whoever uses the libcuda proxy: the first one builds it, and the others wait for that."""
HOW_TO_FORCE = "MPSD_TEST_GPU=1 forces it (scripts/test-gpu)"


def unfit() -> str | None:
    """Why tests on a real GPU cannot run here; None when they should be tried."""
    missing = [path for path in DEVICE_NODES if not os.path.exists(path)]
    if missing:
        return f"no real GPU here: {', '.join(missing)} missing"
    if os.geteuid() != 0:
        return "not root: descriptors of other users' clients may not be duplicated"
    if importlib.util.find_spec("cuda") is None:
        return "the package cuda-bindings is not installed"
    return None


def pytest_configure() -> None:
    """A shell's background command ignores interrupts, and so would all that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "libraries" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(BUILD_S))
    wish = os.environ.get("MPSD_TEST_GPU", "")
    if wish == "1":
        return
    reason = "MPSD_TEST_GPU=0" if wish == "0" else unfit()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"{reason}; {HOW_TO_FORCE}"))
