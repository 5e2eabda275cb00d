"""terminate_client as the MPS server does it: fast for a cooperating client, blocking for a stopped one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpsd.gpu.simulated.machine import semantics
from mpsd.gpu.simulated.machine.parts import Server, Space

if TYPE_CHECKING:
    from mpsd.gpu.simulated.machine.machine import Machine

# The server's other clients do not run meanwhile.
WORK_S, WORK_FILLED_S = 0.003, 0.005
POLL_S = 0.005
_CANNOT_HELP = "TtD"
_DEAD = ("Z", "X", "")


class Terminator:
    """Requests in progress, per server."""

    def __init__(self, machine: Machine, process_state: Callable[[int], str]) -> None:
        self._machine = machine
        self._process_state = process_state
        self._blocked: dict[Server, list[Callable[[], None]]] = {}
        self._after_release: dict[Server, list[Callable[[], None]]] = {}

    def request(self, server: Server, pid: int, done: Callable[[int | None], None]) -> None:
        """Terminate the contexts of `pid`: done(0), or done(None) if it is not a client of that server.

        Does not answer while the server is in FAULT, nor while the client is stopped or traced; in the latter
        case every other client of the server waits too.
        """
        if server.fault or server.faulting:
            self._blocked.setdefault(server, []).append(lambda: self.request(server, pid, done))
            return
        targets = [s for s in server.spaces if s.pid == pid and not s.error]
        if not targets:
            done(None)
            return
        server.held += 1
        for space in targets:
            space.terminating = True
        self._tell(server, targets, "terminating")
        self._ask(server, targets, done)

    def _ask(self, server: Server, targets: list[Space], done: Callable[[int | None], None]) -> None:
        timers, state = self._machine.timers, self._process_state(targets[0].pid)
        if state in _DEAD or not any(t.connected for t in targets):
            self._finish(server, targets, done)
        elif state in _CANNOT_HELP:
            timers.after(POLL_S, lambda: self._ask(server, targets, done))
        else:
            fills = any(t.running is not None and t.running.fill_gpu for t in targets)
            timers.after(WORK_FILLED_S if fills else WORK_S, lambda: self._finish(server, targets, done))

    def _finish(self, server: Server, targets: list[Space], done: Callable[[int | None], None]) -> None:
        for space in targets:
            self._machine.fail(space, semantics.CLIENT_TERMINATED)
            self._machine.settle(space)
        self._tell(server, targets, "terminated")
        self._release(server)
        done(0)

    def _tell(self, server: Server, targets: list[Space], event: str) -> None:
        for space in targets:
            self._machine.output.server_notice(
                server, {"event": event, "pid": space.pid, "context": space.id}
            )

    def _release(self, server: Server) -> None:
        server.held -= 1
        if server.held:
            return
        for action in self._after_release.pop(server, []):
            action()
        self._machine.advance_all(server.spaces)

    def on_release(self, server: Server, action: Callable[[], None]) -> None:
        self._after_release.setdefault(server, []).append(action)

    def server_usable(self, server: Server) -> None:
        """Continue blocked requests after the server has left FAULT."""
        for again in self._blocked.pop(server, []):
            again()

    def server_gone(self, server: Server) -> None:
        self._blocked.pop(server, None)
        self._after_release.pop(server, None)
