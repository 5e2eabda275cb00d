"""How much address space each client may cover with managed zones. Pure.

A zone costs one mapping of the client and, when it is hit, pages of the GPU's memory: a wild grid can
fill all of its zones before it is put out. So there is a cap for all clients of a GPU together, one for
each of them, and nobody gets more than a share of what is left, small enough that dozens get some. Who
comes when too little is left gets leave for ranges that only absorb.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mpsd.model import ProcessInstance

UNIT = 2 << 20
LEAST = 64 << 20
"""Less than this covers nothing worth having: the client does better with ranges that only absorb."""
SHARE = 16
"""One client gets at most this part of what is left; while that is too little, the least that is of use."""


@dataclass(frozen=True, slots=True)
class ZoneLimits:
    """`gpu_bytes`: of all clients on one GPU. `client_bytes`, `client_zones`: of one client."""

    gpu_bytes: int = 256 << 30
    client_bytes: int = 32 << 30
    client_zones: int = 4096


@dataclass(frozen=True, slots=True)
class Grant:
    """`bytes` of managed zones, 0 for none; `zones` of any kind."""

    bytes: int
    zones: int


@dataclass(slots=True)
class Grants:
    limits: ZoneLimits
    _given: dict[ProcessInstance, tuple[Grant, frozenset[str]]] = field(default_factory=dict)

    def give(self, process: ProcessInstance, gpus: Sequence[str], laid: int) -> Grant | None:
        """What the process may lay on these GPUs; None where the limits want no zones at all.

        A process that has a grant keeps it. `laid`: bytes that it has laid already under a daemon before
        this one. That is its own word: it is believed as far as half of the GPU's cap stays for the others.
        """
        known = self._given.get(process)
        if known is not None:
            return known[0]
        if not (gpus and self.limits.gpu_bytes and self.limits.client_bytes and self.limits.client_zones):
            return None
        left = min(self.limits.gpu_bytes - self.given_on(gpu) for gpu in gpus)
        share = max(LEAST, left // SHARE // UNIT * UNIT)
        believed = min(laid, left - self.limits.gpu_bytes // 2)
        size = min(self.limits.client_bytes, left, max(share, believed))
        grant = Grant(size if size >= LEAST else 0, self.limits.client_zones)
        self._given[process] = grant, frozenset(gpus)
        return grant

    def take_back(self, process: ProcessInstance) -> None:
        self._given.pop(process, None)

    def of(self, process: ProcessInstance) -> Grant | None:
        known = self._given.get(process)
        return known[0] if known else None

    def given_on(self, gpu: str) -> int:
        return sum(grant.bytes for grant, gpus in self._given.values() if gpu in gpus)
