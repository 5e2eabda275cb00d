"""Schedulers of mpsd-standby, with simulated processes that follow their orders."""

from __future__ import annotations

from mpsd_client.standby.schedule import (
    Action,
    End,
    GiveTurn,
    Leave,
    ReleaseMemory,
    RemainingWork,
    Role,
    Say,
    Scheduler,
    Settle,
    Start,
)


class Play:
    """A scheduler with processes that follow its orders at once.

    `hear`: ready processes can be told to release their memory, which they do only at `leaves`. Processes in
    `slow` end only at `die`.
    """

    def __init__(self, *, warm: bool = True, restarts: int = 5, hear: bool = False) -> None:
        self.rota = Scheduler(warm=warm, restarts=restarts)
        self.hear = hear
        self.slow: set[int] = set()
        self.told: set[int] = set()
        self.killed: set[int] = set()
        self.left: set[int] = set()
        self.now = 0.0
        self.pid = 99
        self.alive: dict[int, Role] = {}
        self.domain = 1
        self.lost: set[str] = set()
        self.did: list[Action] = []
        self.said: list[str] = []
        self.status: int | None = None

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            self.did.append(action)
            match action:
                case Start(role):
                    self.rota.asking()
                    waiting = {self.rota.waiting.number} if self.rota.waiting is not None else set()
                    beside = set(self.alive) - waiting
                    assert role is not Role.AGAIN or beside <= self.left, "beside who has it still"
                    assert role is not Role.STANDBY or len(self.alive) == 1, "three at a time"
                    self.pid += 1
                    self.alive[self.pid] = role
                    free = [n for n in range(self.domain, self.domain + 9) if f"d{n}" not in self.lost]
                    self.domain, domain = free[0], free[role is Role.STANDBY]
                    self.do(self.rota.started(self.pid, f"d{domain}"))
                case ReleaseMemory(number):
                    assert number in self.alive and number not in self.told
                    self.told.add(number)
                case End(number):
                    assert number in self.alive and number not in self.killed
                    self.killed.add(number)
                    if number not in self.slow:
                        self.die(number)
                case Settle(number):
                    assert number not in self.alive
                    self.do(self.rota.settled(number, RemainingWork.NOTHING))
                case GiveTurn(number):
                    assert number in self.alive
                    assert {pid for pid in self.alive if pid < number} <= self.left, "beside who has it still"
                    working = self.rota.working
                    assert working is not None and working.domain not in self.lost, "a turn in a lost domain"
                case Leave(status):
                    assert not self.alive
                    self.status = status
                case Say(kind, _):
                    self.said.append(kind)

    def begin(self) -> Play:
        self.do(self.rota.begin())
        return self

    def ready(self, *pids: int) -> Play:
        for pid in pids:
            if self.hear and self.rota.working is not None and self.rota.working.number == pid:
                self.do(self.rota.can_release(pid))
            self.do(self.rota.ready(pid, self.now))
        return self

    def die(self, pid: int) -> Play:
        del self.alive[pid]
        self.do(self.rota.ended(pid, -9, self.now))
        return self

    def leaves(self, pid: int) -> Play:
        self.left.add(pid)
        self.do(self.rota.memory_released(pid, self.now))
        return self

    def exits(self, pid: int, status: int) -> Play:
        del self.alive[pid]
        self.do(self.rota.ended(pid, status, self.now))
        self.do(self.rota.wants_standby())
        return self

    def lose(self, domain: str, *, work_too: bool = True, faulted: bool = True) -> Play:
        self.lost |= {domain} if work_too else set()
        self.do(self.rota.domain_left(domain, "fault", self.now, work_lost=work_too, faulted=faulted))
        self.do(self.rota.wants_standby())
        return self


def both() -> Play:
    """Return a scheduler with both processes: 100 works in d1, 101 waits in d2."""
    return Play().begin().ready(100, 101)
