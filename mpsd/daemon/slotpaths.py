"""The stable pipe paths of users: which GPUs get domains, and when a path leads to a running domain."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from mpsd.api.operations import find_gpu
from mpsd.api.stateconditions import gpu_conditions
from mpsd.base.conditions import Code, Condition, refusing
from mpsd.base.errors import BusyError, DeadlineError, DeniedError, MpsdError, NotReadyError
from mpsd.base.model import ComputeMode, Gpu
from mpsd.config.layout import Layout
from mpsd.config.schema import DomainMode, Domains
from mpsd.core import events as ev
from mpsd.core import slots
from mpsd.core.state import DomainState, Slot, State
from mpsd.gpu.base import DeviceManager
from mpsd.mps.pathhealth import Trouble

FAILED_FOR_GOOD = 2


def slot_name(gpus: Sequence[str], uid: int | None) -> str:
    """Return a short name that fits a socket path: the first GPU's number, how many more, and the user."""
    more = f"+{len(gpus) - 1}" if len(gpus) > 1 else ""
    return f"{gpus[0].split('-')[1][:8]}{more}-{'all' if uid is None else f'u{uid}'}"


class SlotPaths:
    """Hands out the pipe paths of slots. `state`: the daemon's present state."""

    def __init__(
        self,
        config: Domains,
        gpus: tuple[Gpu, ...],
        devices: DeviceManager,
        layout: Layout,
        state: Callable[[], State],
        post: Callable[[ev.Event], None],
        hand_out: Callable[[str, int], Awaitable[Trouble | None]],
        owner_of: Callable[[int], int],
    ) -> None:
        """`hand_out`: returns why a user does not get to a slot's active domain; see PathChecks.

        `owner_of`: returns the user that answers for a uid.
        """
        self._config = config
        self._gpus = gpus
        self._devices = devices
        self._layout = layout
        self._state = state
        self._post = post
        self._hand_out = hand_out
        self._owner_of = owner_of
        self.exclusive_gpus: frozenset[str] = frozenset()
        """The GPUs that admit one server only, as last seen."""
        self._start_problems: dict[str, str] = {}
        self._by_server: set[str] = set()
        # Threads write it.
        self._modes_not_read: dict[str, str] = {}

    def groups(self) -> list[tuple[str, ...]]:
        """Return the sets of GPUs that get domains: those that span several GPUs, then each remaining GPU."""
        here = {g.uuid for g in self._gpus}
        spans = [tuple(u for u in span if u in here) for span in self._config.span]
        spanned = {u for span in spans for u in span}
        return [s for s in spans if s] + [(g.uuid,) for g in self._gpus if g.uuid not in spanned]

    def wanted(self, gpus: tuple[str, ...], uid: int | None, *, admin: bool = False) -> ev.SlotWanted:
        """Return the event that asks for this slot. May block: it asks NVML."""
        account = None if uid is None else self._owner_of(uid)
        return ev.SlotWanted(
            slot_name(gpus, uid), gpus, uid, self.exclusive(gpus), account=account, admin=admin
        )

    def exclusive(self, gpus: Sequence[str]) -> bool:
        """Return whether one of the GPUs admits one server only. May block: it asks NVML."""
        modes = [self._compute_mode(gpu) for gpu in gpus]
        return ComputeMode.EXCLUSIVE_PROCESS in modes

    def _compute_mode(self, gpu: str) -> ComputeMode:
        """Return a GPU's compute mode: DEFAULT, with a condition, if it cannot be read."""
        try:
            mode = self._devices.compute_mode(gpu)
        except MpsdError as error:
            self._modes_not_read[gpu] = str(error)
            mode = ComputeMode.DEFAULT
        else:
            self._modes_not_read.pop(gpu, None)
        # Replaced as a whole: the event loop reads it while a thread asks.
        exclusive = {gpu} if mode is ComputeMode.EXCLUSIVE_PROCESS else set()
        self.exclusive_gpus = (self.exclusive_gpus - {gpu}) | exclusive
        return mode

    def refusal(self, gpu: str | None) -> Condition | None:
        """Return why a new client must not join at this GPU, by default the one that path_for() takes.

        Raises NotFoundError.
        """
        return refusing(gpu_conditions(self._state(), self._group(gpu)))

    def _group(self, gpu: str | None) -> tuple[str, ...]:
        """Return the GPUs of the domain for a client: of those that take clients, the ones with fewest."""
        groups = self.groups()
        if gpu is not None:
            uuid = find_gpu(self._gpus, gpu).uuid
            return next(g for g in groups if uuid in g)
        state = self._state()
        return min(groups, key=lambda g: (refusing(gpu_conditions(state, g)) is not None, self._load(g)))

    async def path_for(self, uid: int, gpu: str | None, *, shared: bool, admin: bool) -> str:
        """Return the stable pipe directory for a user, once it leads to a running domain.

        Raises BusyError at a limit on slots, DeadlineError if no domain starts in time. It does not look at
        refusal().
        """
        group = self._group(gpu)
        owner = None if shared or self._config.mode is DomainMode.SHARED else uid
        if os.geteuid() not in (0, owner):
            raise DeniedError(
                f"this mpsd runs as uid {os.geteuid()} and can start MPS servers for that user alone, "
                f"not for {'all users' if owner is None else f'uid {owner}'}",
                remedy="that user: mpsd-ctl env without --shared; other users need an mpsd that root runs",
            )
        # In a thread: NVML can block for long.
        wanted = await asyncio.to_thread(partial(self.wanted, group, owner, admin=admin))
        before = self._state().slots.get(wanted.slot)
        failures = before.failures if before is not None else 0
        refused = slots.refusal(self._state(), wanted, time.monotonic())
        self._post(wanted)
        present = self._state().slots.get(wanted.slot)
        if present is None or present.retiring:
            raise self._refusal(refused, wanted)
        path = self._layout.slot_path(wanted.slot)
        await self._until_served(wanted.slot, path, uid, failures)
        return str(path)

    def _refusal(self, refused: slots.SlotRefusal | None, wanted: ev.SlotWanted) -> BusyError:
        count = sum(not s.retiring for s in self._state().slots.values())
        account = wanted.uid if wanted.account is None else wanted.account
        user = f"user {account} with its subordinate uids"
        window = f"within {slots.START_WINDOW_S:g} s"
        what, wait = {
            slots.SlotRefusal.SHARE: (f"{user} has its share of all paths", "end a program of another uid"),
            slots.SlotRefusal.RATE: (
                f"users without a program asked for {slots.STARTS} or more domains {window}",
                "try again in a minute",
            ),
            slots.SlotRefusal.ACCOUNT_RATE: (
                f"{user} asked for {slots.STARTS_PER_ACCOUNT} domains {window} and runs no program",
                "try again in a minute",
            ),
        }.get(
            refused or slots.SlotRefusal.FULL,
            (f"{count} users have their own domains, and all are in use", "try again in some minutes"),
        )
        return BusyError(what, remedy=f"use the shared domain (mpsd-ctl env --shared), or {wait}")

    def _load(self, group: tuple[str, ...]) -> int:
        state = self._state()
        return sum(1 for c in state.clients.values() if state.domains[c.id.domain].gpus == group)

    async def _until_served(self, slot: str, path: Path, uid: int, failures: int) -> None:
        """Wait until the slot leads to a domain that takes clients, and `uid` gets to it.

        `failures`: failed starts before this request. Raises NotReadyError, DeadlineError.
        """
        deadline = self._config.start_deadline_s
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            state = self._state()
            wanted = state.slots.get(slot)
            active = wanted.active if wanted else None
            if active is not None and state.domains[active].state is DomainState.ACTIVE and path.exists():
                if await self._reaches(slot, uid):
                    return
            elif wanted is not None and self._fails(wanted, failures):
                raise self._no_start(slot)
            await asyncio.sleep(0.005)
        if slot in self._start_problems:
            raise self._no_start(slot)
        raise DeadlineError(f"no domain started within {deadline:g} s", remedy="run mpsd-ctl doctor")

    async def _reaches(self, slot: str, uid: int) -> bool:
        """Return whether a user gets to the domain of a slot; False if another domain is on its way.

        Raises NotReadyError.
        """
        trouble = await self._hand_out(slot, uid)
        if trouble is not None and not trouble.dead and trouble.seen:
            raise NotReadyError(
                f"uid {uid} does not get to the domain: {trouble.text}", remedy=trouble.remedy
            )
        return trouble is None

    def _fails(self, slot: Slot, before: int) -> bool:
        """Return whether a request need not wait longer for a start."""
        if slot.id not in self._start_problems:
            return False
        # Most failures may be transient, and the next attempt comes soon. A server's own words are final.
        return slot.failures >= FAILED_FOR_GOOD or (slot.id in self._by_server and slot.failures > before)

    def _no_start(self, slot: str) -> NotReadyError:
        return NotReadyError(
            f"no domain starts for {slot}: {self._start_problems[slot]}",
            remedy="mpsd keeps trying; see mpsd-ctl status and mpsd-ctl doctor",
        )

    def note_start(self, event: ev.DomainStarted | ev.DomainStartFailed | ev.ServerStartFailed) -> None:
        """Keep why a slot's last domain did not start: core forgets a domain that never started."""
        domain = self._state().domains.get(event.domain)
        slot = self._state().slots.get(domain.slot) if domain is not None else None
        if domain is None or (slot is not None and slot.second == domain.id):
            # No client waits for a second standby domain.
            return
        self._start_problems.pop(domain.slot, None)
        self._by_server.discard(domain.slot)
        if not isinstance(event, ev.DomainStarted):
            self._start_problems[domain.slot] = event.reason
            if isinstance(event, ev.ServerStartFailed) or event.by_server:
                self._by_server.add(domain.slot)

    def conditions(self) -> list[Condition]:
        """Return why slots have no domain. Forget the failures of slots that do not exist."""
        known = self._state().slots
        self._start_problems = {slot: why for slot, why in self._start_problems.items() if slot in known}
        self._by_server &= known.keys()
        found = [Condition(Code.NO_DOMAIN, slot, why) for slot, why in self._start_problems.items()]
        found += [Condition(Code.MODE_NOT_READ, gpu, why) for gpu, why in self._modes_not_read.copy().items()]
        return found + [
            Condition(Code.STARTS_DELAYED, slot.id, count=len(slot.starts))
            for slot in known.values()
            if slot.delayed
        ]
