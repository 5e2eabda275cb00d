"""What operators and users ask of the vault through mpsd-ctl: list, keep, free.

A user sees and changes what belongs to its uid, administrators everything (mpsd.listener.peers).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from mpsd.core.vault import Holding, Refusal, valid_name
from mpsd.errors import AmbiguousError, MpsdError, NotFoundError, UsageError
from mpsd.listener import Peer
from mpsd.usernames import user_name
from mpsd.vault.hold import Vault

Reply = Mapping[str, Any]
_LOOK = "mpsd-ctl vault list shows what there is"


def must_be_open(vault: Vault) -> None:
    """Raises NotFoundError while no program can bring anything: nothing asked of it could have an effect."""
    if not vault.offered_at:
        raise NotFoundError("the vault is off", remedy="set [vault] enabled = true and restart mpsd")


class Desk:
    def __init__(self, vault: Vault) -> None:
        self._vault = vault

    async def list(self, peer: Peer) -> Reply:
        now = time.monotonic()
        if not any(self._vault.ledger.holdings()):
            must_be_open(self._vault)
        mine = [h for h in self._vault.ledger.holdings() if _may(peer, h)]
        return {"holdings": [self._row(h, now) for h in sorted(mine, key=lambda h: h.id)]}

    def _row(self, holding: Holding, now: float) -> dict[str, Any]:
        keep_age_s = self._vault.ledger.limits.keep_age_s
        died_s = None if holding.died is None else now - holding.died
        return {
            "id": holding.id,
            "uid": holding.owner.uid,
            "user": user_name(holding.owner.uid),
            "cgroup": holding.owner.cgroup,
            "by_token": bool(holding.owner.token),
            "pid": holding.process.pid,
            "start_ticks": holding.process.start_ticks,
            "bytes": holding.size,
            "gpu": holding.gpu,
            "address": hex(holding.address),
            "name": holding.name,
            "alone": holding.alone,
            "age_s": round(now - holding.since, 3),
            "died_s": None if died_s is None else round(died_s, 3),
            "expires_s": None if died_s is None else round(max(0.0, keep_age_s - died_s), 3),
            "stored": self._vault.is_stored(holding),
        }

    async def keep(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        pid, name = int(args["pid"]), str(args["name"])
        found = self._vault.owner_of(pid)
        if found is None or not (peer.admin or peer.uid == found[1].uid):
            must_be_open(self._vault)
            # The same words for another user's client and for what is none.
            raise NotFoundError(
                f"process {pid} is no client of yours of the vault",
                remedy=f"is it started with mpsd-run, and mpsd's libcuda installed? {_LOOK}",
            )
        process, owner = found
        if args.get("start_ticks") not in (None, process.start_ticks):
            raise AmbiguousError(
                f"process {pid} is not the one that was meant: the pid was used again",
                remedy="look it up again with mpsd-ctl vault list",
            )
        dry_run = bool(args.get("dry_run"))
        refusal = (
            self._vault.ledger.may_keep(owner, process, name)
            if dry_run
            else self._vault.keep(process, name).refusal
        )
        if refusal is not None:
            raise _keep_error(refusal, name)
        held = [h for h in self._vault.ledger.of(process) if not h.alone]
        size, most = sum(h.size for h in held), self._vault.ledger.limits.kept
        return {
            "held": [h.id for h in held],
            "bytes": size,
            "dry_run": dry_run,
            "too_much": size > most.bytes or len(held) > most.descriptors,
        }

    async def free(self, peer: Peer, args: Mapping[str, Any]) -> Reply:
        what = str(args["what"])
        found = self._meant(peer, what)
        if not args.get("dry_run"):
            await self._vault.gone(self._vault.ledger.free(found))
        return {
            "freed": [h.id for h in found],
            "bytes": sum(h.size for h in found),
            "dry_run": bool(args.get("dry_run")),
        }

    def _meant(self, peer: Peer, what: str) -> tuple[Holding, ...]:
        by_id = int(what) if what.isdecimal() else None
        found = [h for h in self._vault.ledger.holdings() if by_id == h.id or what == h.name]
        mine = tuple(h for h in found if _may(peer, h))
        if not mine:
            must_be_open(self._vault)
            # Not told whether another user has it.
            raise NotFoundError(f"the vault holds nothing of yours as {what!r}", remedy=_LOOK)
        if len({h.owner for h in mine}) > 1:
            raise AmbiguousError(
                f"several owners keep something as {what!r}", remedy="free it by id: mpsd-ctl vault list"
            )
        return mine


def _may(peer: Peer, holding: Holding) -> bool:
    return peer.admin or peer.uid == holding.owner.uid


def _keep_error(refusal: Refusal, name: str) -> MpsdError:
    if refusal is Refusal.BAD_NAME or not valid_name(name):
        return UsageError(
            f"{name!r} is not a name", remedy="1 to 63 printable characters without blanks, not a number"
        )
    return AmbiguousError(
        f"another process of the same owner keeps memory as {name!r}, or it is the name of one piece",
        remedy="choose another name, or free that one first",
    )
