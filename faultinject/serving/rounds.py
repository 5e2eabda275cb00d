"""Waves of requests to one server, and a neighbour's fault in the middle of each."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from faultinject.failover.rounds import FAULT_S, PARTS, READY_S, UP_S, Rounds
from faultinject.history import clock
from faultinject.proxy.library import MPSD_RUN, Libraries
from faultinject.rig import Rig
from faultinject.serving.batch import SLOTS, Request, wave
from faultinject.serving.measure import Heard, Said, Served, by_request, fill, repeated
from faultinject.worker import Worker
from mpsd.errors import DeadlineError, MpsdError, UnsupportedError

ANSWERED_S = 90.0
"""For all answers of a wave, restarts included."""
LOOK_S = 0.1
EARLIEST, LATEST = 0.05, 0.45
"""How much of a wave has been said when the fault comes: enough is left for a fault that takes its time."""

Answers = Mapping[int, Sequence[int]]


class Client:
    """Who sends requests and hears tokens. `spawn` starts a process of the server, by its number."""

    def __init__(self, spawn: Callable[[int], Worker]) -> None:
        self._spawn = spawn
        self._life = -1
        self.begin_wave([])
        self.anew()

    def begin_wave(self, requests: Sequence[Request]) -> None:
        """Forget what was before, and ask for these."""
        self.asked: list[Request] = []
        self.said: list[Said] = []
        self._had: Counter[tuple[int, int]] = Counter()
        self._open: dict[int, Request] = {}
        if requests:
            self.ask(requests)

    def anew(self) -> None:
        """Another process, which gets what is open at once: from its beginning, in the order of arrival."""
        self._life += 1
        self.worker = self._spawn(self._life)
        self._seen = 0
        if self._open:
            self._send(list(self._open.values()))

    def ask(self, requests: Sequence[Request]) -> None:
        self.asked += requests
        self._open |= {request.number: request for request in requests}
        self._send(requests)

    def _send(self, requests: Sequence[Request]) -> None:
        self.worker.tell("requests", requests=[request.data() for request in requests])

    @property
    def open(self) -> int:
        """How many requests have not had all their tokens."""
        return len(self._open)

    def until(self, holds: Callable[[], bool], end: float) -> bool:
        """Hear tokens until that holds. False: the server is over, or it is too late."""
        while True:
            self._hear()
            if holds():
                return True
            if clock() > end:
                return False
            over = self.worker.wait("step", timeout=LOOK_S, after=self._seen) is None and self.ended
            if over and not self._hear():
                return holds()

    @property
    def ended(self) -> bool:
        """The process is gone. What it said last may still be on its way."""
        return self.worker.heard("gone") is not None

    def _hear(self) -> int:
        """How many steps were new."""
        steps = self.worker.said("step")[self._seen :]
        self._seen += len(steps)
        for step in steps:
            for number, _, token in step.data["tokens"]:
                self._token(Said(self._life, step.t, number, token))
        return len(steps)

    def _token(self, said: Said) -> None:
        self.said.append(said)
        self._had[said.life, said.number] += 1
        known = self._open.get(said.number)
        if known is not None and self._had[said.life, said.number] == known.tokens:
            del self._open[said.number]

    def heard(self) -> list[Heard]:
        return by_request(self.asked, self.said)

    def stop(self) -> None:
        self.worker.tell("stop")
        self.worker.must("done", "gone", timeout=FAULT_S)


class Serving(Rounds):
    """A server that is `moved`, `restarted`, or `alone`: without faults, what the others have to say."""

    def __init__(
        self,
        rig: Rig,
        libraries: Libraries,
        tell: Callable[[str], None],
        mode: str,
        seed: int,
        answers: Answers,
    ) -> None:
        super().__init__(rig, libraries, tell)
        self._mode, self._answers = mode, answers
        self._waves = 0
        self._seed, self._choose = seed, random.Random(f"{seed} {mode}")

    def start(self) -> None:
        """The server, ready. Raises DeadlineError, UnsupportedError."""
        service = self._rig.mpsd
        joining = service.client_environment()
        self._path = joining["CUDA_MPS_PIPE_DIRECTORY"]
        if self._mode == "moved":
            environment = self._libraries.proxied(service.environment, service.socket, vault=True)
        else:
            environment = self._libraries.plain(joining)
        device = "standin" if self._libraries.driver else None

        def spawn(life: int) -> Worker:
            return self._rig.spawn(
                f"{self._mode}-{life}",
                "serve",
                environment=environment,
                through=MPSD_RUN if self._mode == "moved" else (),
                device=device,
            )

        self._client = Client(spawn)
        said = self._client.worker.must("ready", "lacking", "error", timeout=UP_S)
        if said.what == "lacking":
            raise UnsupportedError(f"the server cannot run here: {said.data['text']}", remedy="install it")
        if said.what == "error":
            raise DeadlineError(self._why_silent())
        self.model = str(said.data["model"])
        self._servers = [self._client.worker]
        self._stand_by()

    def undisturbed(self, waves: int) -> list[Heard]:
        """The answers to so many waves. Raises DeadlineError."""
        found = list[Heard]()
        for number in range(waves):
            self._client.begin_wave(wave(self._seed, number))
            self._all_answered(None, clock() + ANSWERED_S)
            found += self._client.heard()
        return found

    def serve(self, kind: str, faults: int, deadline_s: float) -> list[Served]:
        """So many of one kind, as far as the time reaches; the first problem is the last."""
        end, found = clock() + deadline_s, list[Served]()
        for number in range(faults):
            one = Served(kind)
            found.append(one)
            try:
                if clock() > end:
                    raise DeadlineError(f"the deadline passed after {number} of {faults}")
                self._wave(one)
            except MpsdError as error:
                one.problem = str(error)
            self._waves += 1
            self._tell(f"{self._mode} {kind} {number + 1}/{faults}: {one.problem or f'{one.longest} ms'}")
            if one.problem:
                break
        return found

    def _wave(self, one: Served) -> None:
        """Raises MpsdError, but what was heard is in `one` then, too."""
        self._until_ready()
        offender = None if one.kind in PARTS else self._offender(one.kind, self._waves)
        self._bystander.stall()
        requests = wave(self._seed, self._waves)
        self._client.begin_wave(requests)
        part = self._choose.uniform(EARLIEST, LATEST) * sum(each.tokens for each in requests)
        if not self._client.until(lambda: len(self._client.said) >= part, clock() + ANSWERED_S):
            raise DeadlineError(self._why_silent())
        at = offender.tell("go") if offender else self._server_dies()
        try:
            self._through(one, requests, at)
        finally:
            fill(one, self._client.heard(), self._answers, at)
        one.stall, wrong = self._bystander.stall(at)
        if wrong:
            raise DeadlineError("the bystander saw wrong results")

    def _until_ready(self) -> None:
        """The next fault may come: there is another domain to go to."""
        if self._mode == "moved":
            self._wait_until_ready(self._servers)
            return

        def both(status: Mapping[str, Any]) -> bool:
            wanted = (("active", "active"), ("spare", "warm"))
            return all(self._domain(status, *each) is not None for each in wanted)

        if self._rig.mpsd.until(both, READY_S) is None:
            raise DeadlineError(f"mpsd had no domain and a spare within {READY_S:.0f} s")

    def _domain(self, status: Mapping[str, Any], role: str, state: str) -> Mapping[str, Any] | None:
        """The one of the server's path that is this."""
        return next(
            (
                domain
                for domain in status["domains"]
                if [domain["path"], domain["role"], domain["state"]] == [self._path, role, state]
            ),
            None,
        )

    def _server_dies(self) -> float:
        domain = self._domain(self._rig.mpsd.status(), "active", "active")
        if domain is None or domain["server_pid"] is None:
            raise DeadlineError("there is no MPS server")
        at = clock()
        os.kill(domain["server_pid"], signal.SIGKILL)
        return at

    def _through(self, one: Served, requests: Sequence[Request], at: float) -> None:
        end = at + ANSWERED_S
        if self._mode == "moved":
            try:
                one.record = self._record(at)
            except DeadlineError as error:
                if self._client.ended:
                    one.told += self._client.worker.count("error")
                    raise DeadlineError(f"{error}; {self._why_silent()}") from error
                raise
            self._all_answered(one, end)
            one.record = self._since(one.record["id"])[0]
            return
        self._keep_busy(requests, at + FAULT_S)
        one.ended = round((self._client.worker.must("gone", timeout=LOOK_S).t - at) * 1e3, 3)
        self._all_answered(one, end)

    def _keep_busy(self, requests: Sequence[Request], end: float) -> None:
        """Until the server has ended: a domain can go on for a while after a fault. Raises DeadlineError."""
        client = self._client
        for time in count(1):
            if not client.until(lambda: client.open < SLOTS, end):
                break
            client.ask(repeated(requests, time))
        if not client.ended:
            raise DeadlineError(f"the server lived on for {FAULT_S:.0f} s")

    def _all_answered(self, one: Served | None, end: float) -> None:
        """A server that has ended is started anew where that is the mode. Raises DeadlineError."""
        client = self._client
        while not client.until(lambda: not client.open, end):
            if one is not None and client.ended:
                one.told += client.worker.count("error")
            if not client.ended or self._mode != "restarted" or clock() > end:
                raise DeadlineError(self._why_silent())
            client.anew()
            if one is not None:
                one.starts += 1
            self._servers = [client.worker]

    def _why_silent(self) -> str:
        client, error = self._client, self._client.worker.heard("error")
        if not client.ended:
            return f"{client.open} requests were not answered within {ANSWERED_S:.0f} s"
        said = error.data["text"] if error else "it said nothing"
        return f"the server ended ({said}): {self._rig.error_text(client.worker, 120)}"

    def end(self) -> str:
        self._client.stop()
        self._bystander.end()
        return self._said_of_the_ended()
