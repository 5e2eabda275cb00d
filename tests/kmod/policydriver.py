"""The compiled policy, one request at a time or many at once (programs/policy_driver.c)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpsd.gpu.nvidia.kernel_abi import KernelRecord, decode_record
from tests.kmod.native import POLICY, Pipe, build
from tests.kmod.policymodel import Around, Decision, Fault, Params, Space

WORDS = 20
NEW_SPACE, SET_PARAMS, FAULT, DEADLINE, ACKNOWLEDGE, ABANDONED, KILL, RELEASE, ENDED = range(9)
RECORD, STEP_RECORD, ORPHAN = range(9, 12)

Request = tuple[int, ...]


@dataclass(frozen=True)
class Told:
    """The driver's answer to a request: its result, the last decision, the state of the space."""

    result: int
    decision: Decision
    isolates: bool
    faults: int
    sinks: int
    condemned: bool
    acknowledged: bool
    released: bool
    ended: bool
    next_step: int
    deadline_ns: int
    hits: int
    condemned_ns: int
    beside_hits: int
    orphan_faults: int


def told(raw: bytes) -> Told:
    """Decode an answer of policy_driver.c."""
    word = struct.unpack(f"={WORDS}Q", raw)
    return Told(
        result=word[0],
        decision=Decision(*word[1:6], *(bool(word[6] & bit) for bit in (1, 2, 4))),
        isolates=bool(word[7]),
        faults=word[8],
        sinks=word[9],
        condemned=bool(word[10]),
        acknowledged=bool(word[11]),
        released=bool(word[12]),
        ended=bool(word[13]),
        next_step=word[14],
        deadline_ns=word[15],
        hits=word[16],
        condemned_ns=word[17],
        beside_hits=word[18],
        orphan_faults=word[19],
    )


def expected(
    space: Space, result: int, decision: Decision, around: Around | None, orphan_faults: int = 0
) -> Told:
    """Return the answer expected for the model's state; `around` belongs to the fault."""
    return Told(
        result=int(result),
        decision=decision,
        isolates=decision.isolates,
        faults=space.faults,
        sinks=len(space.sinks),
        condemned=space.condemned_at is not None,
        acknowledged=space.acknowledged,
        released=space.released,
        ended=space.ended,
        next_step=int(space.next_step),
        deadline_ns=space.deadline_ns,
        hits=space.sinks[around.sink - 1].hits if around and around.sink else 0,
        condemned_ns=space.condemned_at or 0,
        beside_hits=space.sinks[around.beside - 1].hits if around and around.beside else 0,
        orphan_faults=orphan_faults,
    )


def params_request(params: Params) -> Request:
    flags = (int(params.nonreplayable), int(params.stop_channels))
    return (SET_PARAMS, params.mode, params.deadline_ms, params.max_sinks, *flags)


def fault_request(fault: Fault, around: Around, now: int, fails: bool = False) -> Request:
    units = (fault.fault_type, fault.access, fault.reason, fault.engine, fault.client_type)
    return (
        *(FAULT, fault.address, fault.batch, *units, int(fault.fatal), int(fault.replayable)),
        *(around.sink | around.beside << 32, around.free_first, around.free_last, around.range),
        *(int(around.can_address), int(around.hmm), int(around.ats), int(around.alone), now, int(fails)),
    )


class Policy:
    """The compiled policy with one space, called as mpsd-uvm calls it."""

    def __init__(self, folder: Path) -> None:
        self._pipe = Pipe(build(folder, "policy_driver", *POLICY), WORDS)

    def ask(self, requests: Sequence[Request]) -> list[bytes]:
        return self._pipe.ask(requests)

    def begin(self, params: Params | None = None) -> None:
        """Begin a new space with these settings."""
        self.ask([(NEW_SPACE,), params_request(params or Params())])

    def tell(self, *request: int) -> Told:
        return told(self.ask([request])[0])

    def fault(self, fault: Fault, around: Around | None = None, now: int = 0, fails: bool = False) -> Told:
        return self.tell(*fault_request(fault, around or Around(), now, fails))

    def faults(self, faults: Iterable[tuple[Fault, Around]], now: int = 0) -> list[Told]:
        return [told(raw) for raw in self.ask([fault_request(*each, now) for each in faults])]

    def record(self) -> KernelRecord:
        """Return the record of the last fault."""
        return decode_record(self.ask([(RECORD,)])[0])

    def step_record(self, step: int, with_fault: bool = False) -> KernelRecord:
        """Return the record of a step. An orphan's record includes the last fault."""
        return decode_record(self.ask([(STEP_RECORD, step, int(with_fault))])[0])

    def close(self) -> None:
        self._pipe.close()
