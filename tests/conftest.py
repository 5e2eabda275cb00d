"""Tests marked `gpu` need a real GPU.

MPSD_TEST_GPU decides: 1 runs them, 0 skips them. Unset, they run where this machine looks suitable; otherwise
the skip says why not.
"""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

from tests.support.waiting import BUILD_S

# The same examples each time: a failure is then the same for every developer. The time of an example, or of
# its making, fails none: it depends on the load of the machine.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

DEVICE_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
BUILDS = frozenset({"libraries", "sanitized"})
"""Fixtures that build the libcuda proxy."""
HOW_TO_FORCE = "MPSD_TEST_GPU=1 forces it (scripts/test-gpu)"


def unfit() -> str | None:
    """Return why tests on a real GPU cannot run here; None if they can be tried."""
    missing = [path for path in DEVICE_NODES if not os.path.exists(path)]
    if missing:
        return f"no real GPU here: {', '.join(missing)} missing"
    if os.geteuid() != 0:
        return "not root: descriptors of other users' clients may not be duplicated"
    if importlib.util.find_spec("cuda") is None:
        return "the package cuda-bindings is not installed"
    return None


def pytest_configure() -> None:
    """A shell's background command ignores SIGINT, and processes that tests start would inherit that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # The first process builds the libraries within its first test, and the others wait for that.
        given = item.get_closest_marker("timeout")
        if BUILDS & {*getattr(item, "fixturenames", ())} and (given is None or given.args[0] < BUILD_S):
            item.add_marker(pytest.mark.timeout(BUILD_S), append=False)
    wish = os.environ.get("MPSD_TEST_GPU", "")
    if wish == "1":
        return
    reason = "MPSD_TEST_GPU=0" if wish == "0" else unfit()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"{reason}; {HOW_TO_FORCE}"))
