"""When a slot's path is handed out, and what a user learns if it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import DeadlineError, GpuError, NotReadyError
from mpsd.base.model import ComputeMode
from mpsd.config.layout import Layout
from mpsd.config.schema import Domains
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core import slots
from mpsd.core.draft import Draft
from mpsd.core.state import DomainState
from mpsd.daemon.slotpaths import SlotPaths, slot_name
from mpsd.gpu.simulated import node
from mpsd.mps.pathhealth import Trouble
from tests.support.core import World, control_of, server_of

UID = 0
WORDS = "server 77 ended with status 1: Failed to start : invalid argument"


class Devices:
    def compute_mode(self, gpu: str) -> ComputeMode:
        return ComputeMode.DEFAULT


class Daemon:
    """Core, with the links of its slots. `troubles`: what the check of a path finds, in order."""

    def __init__(self, base: Path, deadline_s: float = 20.0) -> None:
        self.world = World()
        self.layout = Layout(base / "r", base / "l", base / "s")
        self.layout.prepare()
        self.troubles: list[Trouble | None] = []
        self.asked: list[tuple[str, int]] = []
        devices: Any = Devices()
        gpu = node.gpu(0, 1 << 30)
        self.slot = slot_name([gpu.uuid], UID)
        config = Domains(start_deadline_s=deadline_s)
        state = lambda: self.world.state  # noqa: E731
        owner = lambda uid: uid  # noqa: E731
        self.paths = SlotPaths(config, (gpu,), devices, self.layout, state, self.post, self.hand_out, owner)

    async def hand_out(self, slot: str, uid: int) -> Trouble | None:
        self.asked.append((slot, uid))
        return self.troubles.pop(0) if self.troubles else None

    def post(self, event: ev.Event) -> None:
        if isinstance(event, ev.DomainStarted | ev.DomainStartFailed):
            self.paths.note_start(event)
        for effect in self.world.do(event):
            if isinstance(effect, fx.SwitchPath):
                self.layout.pipe_dir(effect.domain).mkdir(exist_ok=True)
                self.layout.switch(effect.slot, effect.domain)

    def starts(self, name: str) -> None:
        self.post(ev.DomainStarted(name, control_of(name), server_of(name)))

    def fails(self, name: str, *, by_server: bool = False) -> None:
        self.post(ev.DomainStartFailed(name, WORDS, by_server))

    def request(self, *steps: Callable[[], object]) -> str:
        """Return the path for the user; each step happens while the request waits."""

        async def run() -> str:
            async with asyncio.timeout(30):
                asked: Awaitable[str] = asyncio.ensure_future(
                    self.paths.path_for(UID, None, shared=False, admin=False)
                )
                while not any(d.state is DomainState.STARTING for d in self.world.state.domains.values()):
                    await asyncio.sleep(0.001)
                for step in steps:
                    step()
                    await asyncio.sleep(0.02)
                return await asked

        return asyncio.run(run())


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path)


def test_a_path_is_handed_out_once_it_was_seen_working(daemon: Daemon) -> None:
    cut_off = Trouble("the control socket of d1 was removed", "", dead=True)
    daemon.troubles = [cut_off, Trouble("cannot check", "", seen=False), None]
    path = daemon.request(lambda: daemon.starts("d1"))
    assert path == str(daemon.layout.slot_path(daemon.slot))
    assert daemon.asked == [(daemon.slot, UID)] * 3


def test_a_user_that_does_not_get_to_the_run_directory_is_told_at_once(daemon: Daemon) -> None:
    daemon.troubles = [Trouble("/srv is closed to its user", "run chmod o+x /srv")]
    with pytest.raises(NotReadyError, match="uid 0 does not get to the domain: /srv is closed") as refused:
        daemon.request(lambda: daemon.starts("d1"))
    assert refused.value.remedy == "run chmod o+x /srv"


def test_the_words_of_a_server_are_told_after_its_first_failure(daemon: Daemon) -> None:
    with pytest.raises(NotReadyError, match=f"no domain starts for {daemon.slot}: {WORDS}"):
        daemon.request(lambda: daemon.fails("d1", by_server=True))
    assert daemon.paths.conditions() == [Condition(Code.NO_DOMAIN, daemon.slot, WORDS)]
    # The next request starts a domain, and an old failure does not answer for it.
    daemon.post(ev.DomainStopped("d1"))
    assert daemon.request(lambda: daemon.starts("d2"))
    assert not daemon.paths.conditions()


def test_the_failure_of_a_slot_is_forgotten_with_the_slot(daemon: Daemon) -> None:
    with pytest.raises(NotReadyError, match=WORDS):
        daemon.request(lambda: daemon.fails("d1", by_server=True))
    assert daemon.paths.conditions()
    slots.retire(draft := Draft(daemon.world.state, daemon.world.now), draft.state.slots[daemon.slot])
    daemon.world.state = draft.state
    daemon.post(ev.DomainStopped("d1"))
    assert daemon.slot not in daemon.world.state.slots and not daemon.paths.conditions()
    # A later slot of this name has no failure yet.
    daemon.world.want(daemon.slot)
    assert not daemon.paths.conditions()


def test_any_other_failure_may_be_transient(daemon: Daemon) -> None:
    def again() -> None:
        daemon.post(ev.DomainStopped("d1"))
        daemon.post(ev.TimerFired("ensure", daemon.slot))
        daemon.starts("d2")

    assert daemon.request(lambda: daemon.fails("d1"), again)


def test_at_the_deadline_the_last_failure_is_told(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, deadline_s=0.1)
    with pytest.raises(NotReadyError, match=WORDS):
        daemon.request(lambda: daemon.fails("d1"))
    daemon = Daemon(tmp_path, deadline_s=0.1)
    with pytest.raises(DeadlineError, match=r"no domain started within 0\.1 s"):
        daemon.request()


def test_delayed_starts_are_told(daemon: Daemon) -> None:
    daemon.world.want(daemon.slot)
    slot = replace(daemon.world.state.slots[daemon.slot], starts=(1.0, 2.0), delayed=True)
    daemon.world.state = replace(daemon.world.state, slots={daemon.slot: slot})
    assert daemon.paths.conditions() == [Condition(Code.STARTS_DELAYED, daemon.slot, count=2)]


def test_a_compute_mode_that_cannot_be_read_counts_as_default_and_is_told(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Devices, gpu: str) -> ComputeMode:
        raise GpuError("NVML is gone")

    with monkeypatch.context() as broken:
        broken.setattr(Devices, "compute_mode", fails)
        assert daemon.paths.exclusive(["GPU-a"]) is False
        assert daemon.paths.conditions() == [Condition(Code.MODE_NOT_READ, "GPU-a", "NVML is gone")]
    assert daemon.paths.exclusive(["GPU-a"]) is False
    assert daemon.paths.conditions() == []
