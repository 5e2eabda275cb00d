"""Whether clients of a domain's user get to its control socket, and mending of what is in their way.

A domain is reached through the stable path of its slot, or by its own pipe directory while it is a standby
domain. mpsd mends modes of its directories. It cannot make a removed control socket again: the domain then
serves the clients that it has, and no new one.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import structlog

from mpsd.base.errors import MpsdError
from mpsd.config.layout import Layout
from mpsd.mps import pipedir
from mpsd.mps.reachability import Blocked, Obstacle, Reachability

log = structlog.get_logger("mpsd.pathhealth")


@dataclass(frozen=True, slots=True)
class Path:
    """The path to a domain. `owner`: its user, None for a shared domain. `uid`: the user that tries the path.

    `slot`: the slot that leads to the domain, None for a domain without a path of its own.
    """

    domain: str
    owner: int | None
    uid: int | None
    slot: str | None = None


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a path does not work. `dead`: the domain is cut off from its own user, so another may work.

    `seen`: False if the path could not be checked.
    """

    text: str
    remedy: str
    dead: bool = False
    seen: bool = True


class PathHealth:
    """Checks and mends paths. Lives on the event loop. `private`: see pipedir.prepare."""

    def __init__(self, layout: Layout, *, private: bool) -> None:
        self._layout = layout
        self._private = private
        self._reach = Reachability()

    @property
    def problem(self) -> str:
        return self._reach.problem

    async def check(self, paths: Sequence[Path]) -> list[Trouble | None]:
        """Return what is wrong with each path, after an attempt to mend it; None: it works."""
        found = await self._reach.check([(path.uid, self._socket(path)) for path in paths])
        wrong = [n for n, blocked in enumerate(found) if blocked is not None]
        for number in wrong:
            blocked = found[number]
            if blocked is not None and blocked.obstacle is not Obstacle.UNKNOWN:
                self._mend(paths[number], blocked)
        again = await self._reach.check([(paths[n].uid, self._socket(paths[n])) for n in wrong])
        for number, now in zip(wrong, again, strict=True):
            was = found[number]
            if now is None and was is not None and was.obstacle is not Obstacle.UNKNOWN:
                log.warning(
                    "a path was mended", domain=paths[number].domain, at=was.at, was=was.obstacle.value
                )
            found[number] = now
        alone = await self._closed_to_one([(paths[number], found[number]) for number in wrong])
        return [self._trouble(path, blocked, alone) for path, blocked in zip(paths, found, strict=True)]

    async def _closed_to_one(self, tried: Sequence[tuple[Path, Blocked | None]]) -> set[Path]:
        """Return the paths that are closed to the user that tried them, and not to the domain's own user."""
        asked = [p for p, b in tried if b is not None and b.obstacle is Obstacle.CLOSED and p.uid != p.owner]
        found = await self._reach.check([(path.owner, self._socket(path)) for path in asked])
        return {
            path
            for path, blocked in zip(asked, found, strict=True)
            if blocked is None or blocked.obstacle is Obstacle.UNKNOWN
        }

    def _socket(self, path: Path) -> str:
        layout = self._layout
        where = layout.pipe_dir(path.domain) if path.slot is None else layout.slot_path(path.slot)
        return pipedir.socket_path(str(where))

    def _pipe_dir(self, domain: str) -> str:
        """Return the pipe directory as the kernel names it: run_dir may lead through links."""
        return os.path.join(os.path.realpath(self._layout.run_dir), "d", domain)

    def _mend(self, path: Path, blocked: Blocked) -> None:
        """Open directories of mpsd. A slot's link is made again by its own check, which knows the slot."""
        pipe_dir = str(self._layout.pipe_dir(path.domain))
        try:
            self._layout.open_directories()
            closed = blocked.at == self._pipe_dir(path.domain) and blocked.obstacle is Obstacle.CLOSED
            if closed and os.path.isdir(pipe_dir):
                private_to = path.owner if self._private else None
                pipedir.prepare(pipe_dir, str(self._layout.domain_log_dir(path.domain)), private_to)
        except (OSError, MpsdError) as error:
            log.warning("cannot mend a path", domain=path.domain, at=blocked.at, reason=str(error))

    def _trouble(self, path: Path, blocked: Blocked | None, alone: Collection[Path]) -> Trouble | None:
        if blocked is None:
            return None
        if blocked.obstacle is Obstacle.UNKNOWN:
            text = f"cannot check {blocked.at}: {blocked.text}"
            return Trouble(text, "mpsd tries again each second; see mpsd-ctl status", seen=False)
        pipe_dir = self._pipe_dir(path.domain)
        own = {
            pipe_dir: f"the pipe directory of {path.domain}",
            pipedir.socket_path(pipe_dir): f"the control socket of {path.domain}",
        }
        if path in alone:
            text = f"{own.get(blocked.at, blocked.at)} is closed to uid {path.uid}"
            remedy = f"run getfacl {blocked.at} and remove the row that keeps uid {path.uid} out"
            return Trouble(text, remedy)
        text = describe(blocked, path.owner, own)
        return Trouble(text, remedy_for(blocked), dead=blocked.at in own)

    def close(self) -> None:
        self._reach.close()


def describe(blocked: Blocked, uid: int | None, names: dict[str, str]) -> str:
    """Return a statement about an obstacle. `names`: what to call some paths."""
    name = names.get(blocked.at, blocked.at)
    if blocked.obstacle is Obstacle.CLOSED:
        return f"{name} is closed to {'other users' if uid is None else 'its user'}"
    if blocked.obstacle is Obstacle.UNSERVED:
        return f"no process holds {name}"
    return f"{name} was removed" if blocked.at in names else f"{name} does not exist"


def remedy_for(blocked: Blocked) -> str:
    """Return what an operator can do about an obstacle that mpsd does not mend."""
    if blocked.obstacle is Obstacle.CLOSED:
        return f"run chmod o+x {blocked.at}, or set another run_dir"
    return "restart mpsd; keep other programs away from run_dir"
