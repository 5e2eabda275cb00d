"""The v2 text commands of the stock control binary, each with a deadline.

A command goes to the stdin of a short-lived copy of the binary; what it did is read from its output
(mpsd.controltext), never from its exit status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from mpsd import controltext
from mpsd.controltext import TerminateOutcome, TerminateReply
from mpsd.errors import ControlError, DeadlineError
from mpsd.linux import spawn
from mpsd.model import ServerState

COMMAND_DEADLINE_S = 2.0
BUSY_PAUSE_S = 0.002
MINIMAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ControlGoneError(ControlError):
    """No control daemon answers in the pipe directory."""

    code = "control-gone"


class ControlCommands:
    """The commands of the control daemon in one pipe directory, whoever started it.

    Every method raises DeadlineError when the answer does not come in time (the front end has been
    killed by then), ControlGoneError when no daemon answers, ControlError for an answer that makes
    no sense.
    """

    def __init__(
        self,
        binary: str,
        pipe_dir: str,
        log_dir: str,
        *,
        gpus: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`gpus` are the UUIDs the domain spans (none: all), `environment` is added for every process."""
        self.binary = binary
        self.pipe_dir = pipe_dir
        self.log_dir = log_dir
        self.gpus = tuple(gpus)
        self.environment = {"PATH": MINIMAL_PATH, **(environment or {})}
        self.environment["CUDA_MPS_PIPE_DIRECTORY"] = pipe_dir
        self.environment["CUDA_MPS_LOG_DIRECTORY"] = log_dir
        self._turn = asyncio.Lock()

    async def command(self, text: str, deadline_s: float = COMMAND_DEADLINE_S) -> str:
        """Send one command line, return the whole answer.

        The daemon serves one front end at a time and turns others away, so commands of this process
        wait for each other, and one that met somebody else's is sent again.
        """
        if "\n" in text or not text.strip():
            raise ControlError(f"exactly one command at a time: {text!r}")
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await self._turn.acquire()
        except TimeoutError:
            raise DeadlineError(
                f"{text.split()[0]}: the control daemon was busy for {deadline_s:g} s"
            ) from None
        try:
            while True:
                finished = await spawn.run(
                    [self.binary],
                    text=f"{text}\n",
                    environment=self.environment,
                    deadline_s=max(end - loop.time(), 0.001),
                )
                if not controltext.busy(text, finished.output):
                    return self._checked(text, finished)
                await asyncio.sleep(BUSY_PAUSE_S)
        finally:
            self._turn.release()

    def _checked(self, text: str, finished: spawn.Finished) -> str:
        if controltext.no_daemon(finished.output):
            raise ControlGoneError(
                f"no control daemon answers in {self.pipe_dir}",
                remedy="it has ended, or the directory is not its own",
            )
        if finished.status != 0 and not finished.output.strip():
            raise ControlError(
                f"{text.split()[0]}: the control binary ended with status {finished.status}, saying nothing"
            )
        return finished.output

    async def servers(self, deadline_s: float = COMMAND_DEADLINE_S) -> tuple[int, ...]:
        return controltext.pids(await self.command("get_server_list", deadline_s))

    async def server_state(self, server: int, deadline_s: float = COMMAND_DEADLINE_S) -> ServerState:
        return controltext.server_state(await self.command(f"get_server_status {server}", deadline_s))

    async def clients(self, server: int, deadline_s: float = COMMAND_DEADLINE_S) -> tuple[int, ...]:
        return controltext.pids(await self.command(f"get_client_list {server}", deadline_s))

    async def terminate_client(self, server: int, client: int, deadline_s: float) -> TerminateReply:
        """End a client's GPU work and its place in the server: one process spawn, the daemon does the rest.

        Never to be asked of a server in FAULT, nor for a stopped, frozen or traced client: it would block
        (for the latter with every other client). At the deadline the outcome is DEADLINE, no exception.
        """
        try:
            return controltext.terminated(
                await self.command(f"terminate_client {server} {client}", deadline_s)
            )
        except DeadlineError as error:
            return TerminateReply(TerminateOutcome.DEADLINE, error.message)

    async def start_server(self, uid: int, deadline_s: float = COMMAND_DEADLINE_S) -> str:
        """Ask for a server before its first client comes. It may still be initialising when this returns."""
        return controltext.accepted(
            "start_server", await self.command(f"start_server -uid {uid}", deadline_s)
        )

    async def shutdown_server(
        self, server: int, *, force: bool, deadline_s: float = COMMAND_DEADLINE_S
    ) -> str:
        """End one server: after its clients have left, or with `force` at once."""
        text = f"shutdown_server {server}{' -f' if force else ''}"
        return controltext.accepted("shutdown_server", await self.command(text, deadline_s))

    async def default_active_thread_percentage(self, deadline_s: float = COMMAND_DEADLINE_S) -> float:
        return controltext.percentage(await self.command("get_default_active_thread_percentage", deadline_s))

    async def set_default_active_thread_percentage(
        self, percentage: float, deadline_s: float = COMMAND_DEADLINE_S
    ) -> None:
        """Share of the SMs, (0, 100], for servers started from now on."""
        text = f"set_default_active_thread_percentage {percentage:g}"
        controltext.accepted(text, await self.command(text, deadline_s))

    async def set_default_device_pinned_mem_limit(
        self, device: str, mebibytes: int, deadline_s: float = COMMAND_DEADLINE_S
    ) -> None:
        """GPU memory of each client of future servers. `device`: ordinal or UUID, not validated."""
        text = f"set_default_device_pinned_mem_limit {device} {mebibytes}M"
        controltext.accepted(text, await self.command(text, deadline_s))

    async def default_client_priority(self, deadline_s: float = COMMAND_DEADLINE_S) -> int:
        return controltext.priority(await self.command("get_default_client_priority", deadline_s))

    async def set_default_client_priority(
        self, priority: int, deadline_s: float = COMMAND_DEADLINE_S
    ) -> None:
        """0 normal, 1 below normal, for clients that connect from now on."""
        text = f"set_default_client_priority {priority}"
        controltext.accepted(text, await self.command(text, deadline_s))
