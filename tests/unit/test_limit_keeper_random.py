"""Any order of limits set by hand, new servers, new domains and deaths of mpsd."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpsd.limits import keeper as keeping
from mpsd.limits.book import Owner
from mpsd.limits.values import Key, Kind, agrees, value_of
from tests.support.limiting import OWNER, Scene, StandIn, play

SLOTS = (OWNER, Owner(("GPU-b", "GPU-a"), None))
SAID = (
    ("active_thread_percentage", ("20", "50", "70")),
    ("client_priority", ("0", "1")),
    ("device_pinned_mem_limit", ("512M", "2G", "3G")),
)


class Killed(Exception):
    """The death of mpsd."""


class World:
    """Slots with two domains each. `wanted`: the last limits that were said for each slot."""

    def __init__(self) -> None:
        self.at = Scene()
        self.domains: dict[str, tuple[Owner, StandIn]] = {}
        self.wanted: dict[Owner, dict[Key, str]] = {owner: {} for owner in SLOTS}
        self.number = 0

    async def start(self, owner: Owner) -> None:
        self.number += 1
        name, control = f"d{self.number}", StandIn(owner.gpus)
        self.domains[name] = owner, control
        await self.at.start(name, control, owner)

    async def do(self, draw: st.DataObject) -> None:
        name = draw.draw(st.sampled_from(sorted(self.domains)))
        owner, control = self.domains[name]
        events = ("say", "say unheard", "say and die", "replace", "new server", "restart")
        event = draw.draw(st.sampled_from(events))
        if event == "replace":
            del self.domains[name]
            self.at.keeper.forget(name)
            await self.start(owner)
        elif event == "new server":
            control.start_server(control.server + 1)
            self.at.keeper.server_changed(name)
        elif event == "restart":
            await self.restart()
        else:
            await self.say(draw, name, event)
        await self.at.settled()

    async def restart(self) -> None:
        """Kill mpsd and start it with the last state file."""
        saved = self.at.saved[-1] if self.at.saved else None
        self.at = Scene(saved=saved)
        self.at.saved += [saved] if saved else []
        for name, (owner, control) in self.domains.items():
            self.at.serving.add(name)
            self.at.keeper.adopt(name, owner, control)
        self.at.keeper.begin()
        await self.at.settled()

    async def die(self, after: int) -> None:
        """Run what is under way, kill mpsd before its next command but `after`, and leave it dead."""
        left = after

        def count(_: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed

        for _, control in self.domains.values():
            control.before = count
        while self.at.tasks:
            with contextlib.suppress(Killed):
                await self.at.tasks.pop()
        for _, control in self.domains.values():
            control.before = bool

    async def say(self, draw: st.DataObject, name: str, event: str) -> None:
        """Say a limit by any name of it, while mpsd runs, while none runs, or right before its death."""
        owner, control = self.domains[name]
        kind, values = draw.draw(st.sampled_from(SAID))
        value = draw.draw(st.sampled_from(values))
        of_server = kind != "client_priority" and draw.draw(st.booleans())
        words = [f"{kind} {control.server}" if of_server else f"default_{kind}"]
        key = Key(Kind(kind))
        if kind == "device_pinned_mem_limit":
            place = draw.draw(st.integers(0, len(owner.gpus) - 1))
            key = Key(Kind.MEMORY, owner.gpus[place])
            words.append(draw.draw(st.sampled_from((str(place), owner.gpus[place]))))
        self.wanted[owner][key] = value
        subject = " ".join(words)
        control.set(subject, value)
        if event != "say unheard":
            self.at.keeper.said(name, f"set_{subject} {value}")
        if event == "say and die":
            await self.die(draw.draw(st.integers(0, 20)))
            if draw.draw(st.booleans()):
                # Said once more while no mpsd runs.
                self.wanted[owner][key] = value = draw.draw(st.sampled_from(values))
                control.set(subject, value)
            await self.restart()
        elif event == "say unheard":
            await self.restart()

    def check(self) -> None:
        """Check that every domain of a slot has the last limits that were said there, and no others."""
        for name, (owner, control) in self.domains.items():
            answers = self.at.keeper.answers(name)
            for key, value in self.wanted[owner].items():
                assert agrees(key.kind, value_of(key.kind, value), answers[key]), (name, key)
                device = f" {owner.gpus.index(key.gpu)}" if key.gpu else ""
                subjects = [f"default_{key.kind}{device}"]
                if key.kind is not Kind.PRIORITY:
                    subjects.append(f"{key.kind} {control.server}{device}")
                for subject in subjects:
                    assert agrees(key.kind, value_of(key.kind, value), control.values[subject]), subject
            said = {key for key in answers if key.kind is Kind.MEMORY}
            assert said == {key for key in self.wanted[owner] if key.kind is Kind.MEMORY}
        assert self.at.keeper.conditions() == []


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "STEP_S", 0.0)
    monkeypatch.setattr(keeping, "STAGGER_S", 0.0)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_happens_the_last_limit_said_is_in_force_in_its_slot(data: st.DataObject) -> None:
    async def scene() -> None:
        world = World()
        for owner in SLOTS:
            await world.start(owner)
            await world.start(owner)
        for _ in range(data.draw(st.integers(1, 20))):
            await world.do(data)
            world.check()

    play(scene)
