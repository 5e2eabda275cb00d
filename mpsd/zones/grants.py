"""The address space that each client may cover with managed zones. Pure.

A zone costs one mapping of the client and, when it is hit, pages of GPU memory: a faulty kernel can fill all
of its zones before mpsd evicts the client. So there is a limit for all clients of a GPU together and one for
each client. No client gets more than a share of the rest, small enough that dozens get some. A client that
comes when too little is left may lay only ranges that absorb without a report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mpsd.base.model import ProcessInstance

UNIT = 2 << 20
LEAST = 64 << 20
"""Less than this covers nothing of use: the client is better off with ranges that only absorb."""
SHARE = 24
"""One client gets at most this part of the rest; if that is too little, the least that is of use. With the
default limits a hundred clients get zones."""


@dataclass(frozen=True, slots=True)
class ZoneLimits:
    """Limits. `gpu_bytes`: of all clients on one GPU. `client_bytes`, `client_zones`: of one client."""

    gpu_bytes: int = 64 << 30
    client_bytes: int = 16 << 30
    client_zones: int = 4096


@dataclass(frozen=True, slots=True)
class Grant:
    """A grant of `bytes` of managed zones, 0 for none, and of `zones` of any kind."""

    bytes: int
    zones: int


@dataclass(slots=True)
class Grants:
    limits: ZoneLimits
    _given: dict[ProcessInstance, tuple[Grant, frozenset[str]]] = field(default_factory=dict)

    def give(self, process: ProcessInstance, gpus: Sequence[str], laid: int) -> Grant | None:
        """Return what the process may lay on these GPUs; None if the limits permit no zones at all.

        A process that has a grant keeps it. `laid`: bytes that it laid under an earlier daemon. This is a
        claim of the process: it counts only as far as half of the GPU's limit stays for other clients.
        """
        known = self._given.get(process)
        if known is not None:
            return known[0]
        if not (gpus and self.limits.gpu_bytes and self.limits.client_bytes and self.limits.client_zones):
            return None
        remaining = min(self.limits.gpu_bytes - self.given_on(gpu) for gpu in gpus)
        share = max(LEAST, remaining // SHARE // UNIT * UNIT)
        believed = min(laid, remaining - self.limits.gpu_bytes // 2)
        size = min(self.limits.client_bytes, remaining, max(share, believed))
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
