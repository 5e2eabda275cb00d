"""The vault operations of mpsd-ctl: list, keep, free.

A user sees and changes the segments of its uid, administrators all (mpsd.peers.credentials).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from mpsd.api.usernames import user_name
from mpsd.base import audit
from mpsd.base.errors import AmbiguousError, MpsdError, NotFoundError, UsageError
from mpsd.core.vault import Refusal, Segment, valid_name
from mpsd.peers import Peer
from mpsd.peers.credentials import requester
from mpsd.vault.holdings import Vault

Reply = Mapping[str, Any]
_LIST_OPERATION = "mpsd-ctl vault list shows the segments"


def require_vault(vault: Vault) -> None:
    """Raise NotFoundError if the vault is off: a request could have no effect."""
    if not vault.offered_at:
        remedy = "mpsd-ctl doctor shows what keeps the protection level below guard"
        raise NotFoundError("the vault is off at this protection level", remedy=remedy)


class VaultOperations:
    def __init__(self, vault: Vault) -> None:
        self._vault = vault

    async def list(self, peer: Peer) -> Reply:
        now = time.monotonic()
        if not any(self._vault.ledger.holdings()):
            require_vault(self._vault)
        mine = [h for h in self._vault.ledger.holdings() if _may_access(peer, h)]
        return {"holdings": [self._row(h, now) for h in sorted(mine, key=lambda h: h.id)]}

    def _row(self, holding: Segment, now: float) -> dict[str, Any]:
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
            require_vault(self._vault)
            if found is not None:
                what = f"process {pid} belongs to another user"
                audit.refusals.refuse(peer.uid, "vault_keep", partial(requester, peer), what)
            # The same text for another user's client and for a pid that is no client.
            raise NotFoundError(
                f"process {pid} is not a client of yours in the vault",
                remedy=f"start it with mpsd-run and the proxy installed; {_LIST_OPERATION}",
            )
        process, owner = found
        if args.get("start_ticks") not in (None, process.start_ticks):
            raise AmbiguousError(
                f"process {pid} is another process now: the pid was used again",
                remedy="look up the pid with mpsd-ctl vault list",
            )
        dry_run = bool(args.get("dry_run"))
        refusal = (
            self._vault.ledger.refusal_to_keep(owner, process, name)
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
        found = self._matching(peer, what)
        if not args.get("dry_run"):
            await self._vault.wait_until_released(self._vault.ledger.free(found))
        return {
            "freed": [h.id for h in found],
            "bytes": sum(h.size for h in found),
            "dry_run": bool(args.get("dry_run")),
        }

    def _matching(self, peer: Peer, what: str) -> tuple[Segment, ...]:
        by_id = int(what) if what.isdecimal() else None
        found = [h for h in self._vault.ledger.holdings() if by_id == h.id or what == h.name]
        mine = tuple(h for h in found if _may_access(peer, h))
        if not mine:
            require_vault(self._vault)
            if found:
                reason = f"segment {found[0].id} belongs to another user"
                audit.refusals.refuse(peer.uid, "vault_free", partial(requester, peer), reason)
            # The text hides whether another user has it.
            raise NotFoundError(
                f"the vault holds no segment of yours with id or name {what!r}", remedy=_LIST_OPERATION
            )
        if len({h.owner for h in mine}) > 1:
            raise AmbiguousError(
                f"several owners use the name {what!r}", remedy="free segments by id (mpsd-ctl vault list)"
            )
        return mine


def _may_access(peer: Peer, holding: Segment) -> bool:
    return peer.admin or peer.uid == holding.owner.uid


def _keep_error(refusal: Refusal, name: str) -> MpsdError:
    if refusal is Refusal.BAD_NAME or not valid_name(name):
        return UsageError(
            f"{name!r} is not a valid name",
            remedy="use 1 to 63 printable characters without blanks, not a number",
        )
    return AmbiguousError(
        f"the name {name!r} is in use by another process of the same owner, or by a named buffer",
        remedy="choose another name, or free that memory first",
    )
