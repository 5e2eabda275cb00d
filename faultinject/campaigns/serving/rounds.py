"""Waves of requests to one server, and a neighbour's fault in the middle of each."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from faultinject.campaigns.failover.rounds import (
    FAULT_S,
    PARTS,
    READY_S,
    UP_S,
    Rounds,
)
from faultinject.campaigns.serving.answers import (
    Answer,
    Served,
    Token,
    fill_figures,
    group_by_request,
    renumbered,
)
from faultinject.programs.llm.batch import SLOTS, Request, wave
from faultinject.registry.history import clock
from faultinject.rig.libraries import MPSD_RUN, Libraries
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker
from mpsd.base.errors import DeadlineError, MpsdError, UnsupportedError

ANSWERED_S = 90.0
"""The time for all answers of a wave, restarts included."""
LOOK_S = 0.1
EARLIEST, LATEST = 0.05, 0.45
"""The share of a wave's tokens at the fault: enough is left for a fault that takes time."""

Answers = Mapping[int, Sequence[int]]


class Client:
    """The sender of requests. `spawn` starts a process of the server, by its number."""

    def __init__(self, spawn: Callable[[int], Worker]) -> None:
        self._spawn = spawn
        self._process_number = -1
        self.begin_wave([])
        self.start_process()

    def begin_wave(self, requests: Sequence[Request]) -> None:
        """Forget the earlier requests, and send these."""
        self.requests: list[Request] = []
        self.received: list[Token] = []
        self._token_counts: Counter[tuple[int, int]] = Counter()
        self._open: dict[int, Request] = {}
        if requests:
            self.ask(requests)

    def start_process(self) -> None:
        """Use another process, and send it the open requests from their beginning, in order of arrival."""
        self._process_number += 1
        self.worker = self._spawn(self._process_number)
        self._seen = 0
        if self._open:
            self._send(list(self._open.values()))

    def ask(self, requests: Sequence[Request]) -> None:
        self.requests += requests
        self._open |= {request.number: request for request in requests}
        self._send(requests)

    def _send(self, requests: Sequence[Request]) -> None:
        self.worker.tell("requests", requests=[request.data() for request in requests])

    @property
    def open(self) -> int:
        """Return how many requests lack tokens."""
        return len(self._open)

    def until(self, condition: Callable[[], bool], end: float) -> bool:
        """Read tokens until the condition holds. False: the server has ended, or it is too late."""
        while True:
            self._read_tokens()
            if condition():
                return True
            if clock() > end:
                return False
            over = self.worker.wait("step", timeout=LOOK_S, after=self._seen) is None and self.ended
            if over and not self._read_tokens():
                return condition()

    @property
    def ended(self) -> bool:
        """Return whether the process has ended. Its last messages may still arrive."""
        return self.worker.first_message("gone") is not None

    def _read_tokens(self) -> int:
        """Return how many tokens are new."""
        steps = self.worker.messages("step")[self._seen :]
        self._seen += len(steps)
        for step in steps:
            for number, _, token in step.data["tokens"]:
                self._add_token(Token(self._process_number, step.t, number, token))
        return len(steps)

    def _add_token(self, token: Token) -> None:
        self.received.append(token)
        self._token_counts[token.process_number, token.number] += 1
        known = self._open.get(token.number)
        if known is not None and self._token_counts[token.process_number, token.number] == known.tokens:
            del self._open[token.number]

    def answers(self) -> list[Answer]:
        return group_by_request(self.requests, self.received)

    def stop(self) -> None:
        self.worker.tell("stop")
        self.worker.require("done", "gone", timeout=FAULT_S)


class Serving(Rounds):
    """A server that is `moved`, `restarted`, or `alone`: without faults, for comparison."""

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
        """Start the server. Raises DeadlineError, UnsupportedError."""
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
                "llm.serve",
                environment=environment,
                through=MPSD_RUN if self._mode == "moved" else (),
                device=device,
            )

        self._client = Client(spawn)
        message = self._client.worker.require("ready", "lacking", "error", timeout=UP_S)
        if message.what == "lacking":
            raise UnsupportedError(f"the server cannot run here: {message.data['text']}", remedy="install it")
        if message.what == "error":
            raise DeadlineError(self._describe_silence())
        self.model = str(message.data["model"])
        self._servers = [self._client.worker]
        self._start_bystander()

    def undisturbed(self, waves: int) -> list[Answer]:
        """Return the answers to this many waves. Raises DeadlineError."""
        found = list[Answer]()
        for number in range(waves):
            self._client.begin_wave(wave(self._seed, number))
            self._await_all_answers(None, clock() + ANSWERED_S)
            found += self._client.answers()
        return found

    def serve(self, kind: str, faults: int, deadline_s: float) -> list[Served]:
        """Inject this many faults of one kind within the deadline, up to the first problem."""
        end, found = clock() + deadline_s, list[Served]()
        for number in range(faults):
            served = Served(kind)
            found.append(served)
            try:
                if clock() > end:
                    raise DeadlineError(f"the deadline passed after {number} of {faults}")
                self._run_wave(served)
            except MpsdError as error:
                served.problem = str(error)
            self._waves += 1
            self._tell(
                f"{self._mode} {kind} {number + 1}/{faults}: {served.problem or f'{served.longest} ms'}"
            )
            if served.problem:
                break
        return found

    def _run_wave(self, served: Served) -> None:
        """Run one wave. Raises MpsdError; the answers so far are in `one` then."""
        self._await_next_fault_possible()
        offender = None if served.kind in PARTS else self._take_offender(served.kind, self._waves)
        self._bystander.stall()
        requests = wave(self._seed, self._waves)
        self._client.begin_wave(requests)
        part = self._choose.uniform(EARLIEST, LATEST) * sum(entry.tokens for entry in requests)
        if not self._client.until(lambda: len(self._client.received) >= part, clock() + ANSWERED_S):
            raise DeadlineError(self._describe_silence())
        at = offender.tell("go") if offender else self._kill_server(self._find_server())
        try:
            self._await_answers_after_fault(served, requests, at)
        finally:
            fill_figures(served, self._client.answers(), self._answers, at)
        served.stall, wrong = self._bystander.stall(at)
        if wrong:
            raise DeadlineError("the bystander saw wrong results")

    def _await_next_fault_possible(self) -> None:
        """Wait until the next fault may come: there is another domain to fail over to."""
        if self._mode == "moved":
            self._wait_until_ready(self._servers)
            return

        def both(status: Mapping[str, Any]) -> bool:
            wanted = (("active", "active"), ("spare", "warm"))
            return all(self._domain(status, *entry) is not None for entry in wanted)

        if self._rig.mpsd.until(both, READY_S) is None:
            raise DeadlineError(f"mpsd had no domain and standby domain within {READY_S:.0f} s")

    def _domain(self, status: Mapping[str, Any], role: str, state: str) -> Mapping[str, Any] | None:
        """Return whether this is a domain of the server's slot."""
        return next(
            (
                domain
                for domain in status["domains"]
                if [domain["path"], domain["role"], domain["state"]] == [self._path, role, state]
            ),
            None,
        )

    def _find_server(self) -> int:
        domain = self._domain(self._rig.mpsd.status(), "active", "active")
        if domain is None or domain["server_pid"] is None:
            raise DeadlineError("there is no MPS server")
        return int(domain["server_pid"])

    def _await_answers_after_fault(self, served: Served, requests: Sequence[Request], at: float) -> None:
        end = at + ANSWERED_S
        if self._mode == "moved":
            try:
                served.record = self._await_record(at)
            except DeadlineError as error:
                if self._client.ended:
                    served.told += self._client.worker.count("error")
                    raise DeadlineError(f"{error}; {self._describe_silence()}") from error
                raise
            self._await_all_answers(served, end)
            served.record = self._failovers_since(served.record["id"])[0]
            return
        self._keep_busy_until_exit(requests, at + FAULT_S)
        served.ended = round((self._client.worker.require("gone", timeout=LOOK_S).t - at) * 1e3, 3)
        self._await_all_answers(served, end)

    def _keep_busy_until_exit(self, requests: Sequence[Request], end: float) -> None:
        """Wait until the server has ended: a domain can continue for a while after a fault.

        Raises DeadlineError.
        """
        client = self._client
        for time in count(1):
            if not client.until(lambda: client.open < SLOTS, end):
                break
            client.ask(renumbered(requests, time))
        if not client.ended:
            raise DeadlineError(f"the server lived on for {FAULT_S:.0f} s")

    def _await_all_answers(self, served: Served | None, end: float) -> None:
        """Restart a server that has ended, in mode restarted. Raises DeadlineError."""
        client = self._client
        while not client.until(lambda: not client.open, end):
            if served is not None and client.ended:
                served.told += client.worker.count("error")
            if not client.ended or self._mode != "restarted" or clock() > end:
                raise DeadlineError(self._describe_silence())
            client.start_process()
            if served is not None:
                served.starts += 1
            self._servers = [client.worker]

    def _describe_silence(self) -> str:
        client, error = self._client, self._client.worker.first_message("error")
        if not client.ended:
            return f"{client.open} requests were not answered within {ANSWERED_S:.0f} s"
        reason = error.data["text"] if error else "it said nothing"
        return f"the server ended ({reason}): {self._rig.error_text(client.worker, 120)}"

    def end(self) -> str:
        self._client.stop()
        self._bystander.end()
        return self._blame_after_end()
