"""The v2 text commands of the stock control binary, each with a deadline.

A command goes to the stdin of a short-lived run of the binary. Its result is read from the output
(mpsd.mps.answers), never from the exit status.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence

from mpsd.base.errors import ControlError, DeadlineError
from mpsd.base.model import ServerState
from mpsd.mps import answers
from mpsd.mps.answers import TerminateOutcome, TerminateReply
from mpsd.os import spawn

COMMAND_DEADLINE_S = 2.0
BUSY_PAUSE_S = 0.002
MINIMAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ControlGoneError(ControlError):
    """No control daemon answers in the pipe directory."""

    code = "control-gone"


class ControlCommands:
    """The commands of the control daemon in one pipe directory, even if mpsd did not start it.

    Every method raises DeadlineError when the answer does not come in time (the front end has been killed by
    then), ControlGoneError when no daemon answers, ControlError for an answer that makes no sense.
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
        """Keep the GPUs of the domain (UUIDs; none: all) and an `environment` to add for every process."""
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

        The daemon serves one front end at a time and turns the rest away. Commands of this process therefore
        wait for each other, and a command that collided with a foreign front end is sent again.
        """
        if "\n" in text or not text.strip():
            raise ControlError(f"expected exactly one command: {text!r}")
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
                try:
                    finished = await spawn.run(
                        [self.binary],
                        text=f"{text}\n",
                        environment=self.environment,
                        deadline_s=max(end - loop.time(), 0.001),
                    )
                except DeadlineError:
                    # Name the whole deadline, not what earlier attempts and other commands left of it.
                    name = os.path.basename(self.binary)
                    raise DeadlineError(f"{name} ({text}) did not end within {deadline_s:g} s") from None
                if not answers.busy(text, finished.output):
                    return self._checked(text, finished)
                await asyncio.sleep(BUSY_PAUSE_S)
        finally:
            self._turn.release()

    def _checked(self, text: str, finished: spawn.Finished) -> str:
        if answers.no_daemon(finished.output):
            raise ControlGoneError(
                f"no control daemon answers in {self.pipe_dir}",
                remedy="check that the daemon runs and owns this directory",
            )
        if finished.status != 0 and not finished.output.strip():
            raise ControlError(
                f"{text.split()[0]}: the control binary ended with status {finished.status} and no output"
            )
        return finished.output

    async def servers(self, deadline_s: float = COMMAND_DEADLINE_S) -> tuple[int, ...]:
        return answers.pids(await self.command("get_server_list", deadline_s))

    async def server_state(self, server: int, deadline_s: float = COMMAND_DEADLINE_S) -> ServerState:
        return answers.server_state(await self.command(f"get_server_status {server}", deadline_s))

    async def clients(self, server: int, deadline_s: float = COMMAND_DEADLINE_S) -> tuple[int, ...]:
        return answers.pids(await self.command(f"get_client_list {server}", deadline_s))

    async def terminate_client(self, server: int, client: int, deadline_s: float) -> TerminateReply:
        """End a client's GPU work and remove it from the server: one process spawn, the daemon does the rest.

        Never send it to a server in FAULT, nor for a stopped, frozen or traced client: the command would
        block, and in the latter case every other client with it. At the deadline the outcome is DEADLINE; no
        exception is raised.
        """
        try:
            return answers.terminated(await self.command(f"terminate_client {server} {client}", deadline_s))
        except DeadlineError as error:
            return TerminateReply(TerminateOutcome.DEADLINE, error.message)

    async def start_server(self, uid: int, deadline_s: float = COMMAND_DEADLINE_S) -> str:
        """Start a server before its first client connects. It may still be initialising when this returns."""
        return answers.accepted("start_server", await self.command(f"start_server -uid {uid}", deadline_s))

    async def shutdown_server(
        self, server: int, *, force: bool, deadline_s: float = COMMAND_DEADLINE_S
    ) -> str:
        """End one server: after its clients have left, or with `force` at once."""
        text = f"shutdown_server {server}{' -f' if force else ''}"
        return answers.accepted("shutdown_server", await self.command(text, deadline_s))

    async def default_active_thread_percentage(self, deadline_s: float = COMMAND_DEADLINE_S) -> float:
        return answers.percentage(await self.command("get_default_active_thread_percentage", deadline_s))

    async def set_default_active_thread_percentage(
        self, percentage: float, deadline_s: float = COMMAND_DEADLINE_S
    ) -> None:
        """Set the share of the SMs, (0, 100], of servers started from now on."""
        text = f"set_default_active_thread_percentage {percentage:g}"
        answers.accepted(text, await self.command(text, deadline_s))

    async def set_default_device_pinned_mem_limit(
        self, device: str, mebibytes: int, deadline_s: float = COMMAND_DEADLINE_S
    ) -> None:
        """Limit the GPU memory of each client of future servers. `device`: ordinal or UUID, not validated."""
        text = f"set_default_device_pinned_mem_limit {device} {mebibytes}M"
        answers.accepted(text, await self.command(text, deadline_s))

    async def default_client_priority(self, deadline_s: float = COMMAND_DEADLINE_S) -> int:
        return answers.priority(await self.command("get_default_client_priority", deadline_s))

    async def set_default_client_priority(
        self, priority: int, deadline_s: float = COMMAND_DEADLINE_S
    ) -> None:
        """Set the priority of clients that connect from now on: 0 normal, 1 below normal."""
        text = f"set_default_client_priority {priority}"
        answers.accepted(text, await self.command(text, deadline_s))
