"""Run a short command from the event loop: text in, text out, killed at its deadline.

One vfork and exec, no thread, no child watcher. A pidfd tells when the command has ended, and output is read
until then, so a grandchild that keeps the pipe open delays nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpsd.base.errors import ControlError, DeadlineError
from mpsd.os.procfs import text_of

OUTPUT_LIMIT = 1 << 20
DEATH_PATIENCE_S = 0.5


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended: a negative status is a signal, as in subprocess."""

    status: int
    output: str


async def run(
    argv: Sequence[str], *, text: str = "", environment: Mapping[str, str], deadline_s: float
) -> Finished:
    """Run argv with `text` on stdin, stdout and stderr captured together.

    Raises DeadlineError when it has not ended in time, ControlError when it cannot be started or prints more
    than 1 MiB. In both cases its whole process group has been killed.
    """
    command = _Command(argv, text, environment)
    try:
        async with asyncio.timeout(deadline_s):
            return await command.ended
    except TimeoutError:
        raise DeadlineError(f"{_shown(argv, text)} did not end within {deadline_s:g} s") from None
    finally:
        await command.abandon()


def _shown(argv: Sequence[str], text: str) -> str:
    return f"{os.path.basename(argv[0])} ({text.strip() or ' '.join(argv[1:])})"


class _Command:
    def __init__(self, argv: Sequence[str], text: str, environment: Mapping[str, str]) -> None:
        self._name = _shown(argv, text)
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Finished] = self._loop.create_future()
        self._exited = asyncio.Event()
        self._output = bytearray()
        try:
            self._out, child_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ControlError(f"cannot run {argv[0]}: {error.strerror}") from error
        try:
            stdin = _filled_pipe(text)
        except OSError as error:
            os.close(self._out)
            os.close(child_out)
            raise ControlError(f"cannot run {argv[0]}: {error.strerror}") from error
        try:
            # The child's end must block. O_NONBLOCK belongs to the open file, and each end has its own.
            os.set_blocking(child_out, True)
            self._process = subprocess.Popen(
                list(argv),
                stdin=stdin,
                stdout=child_out,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                cwd="/",
            )
            self._pidfd = _pidfd_of(self._process)
        except OSError as error:
            os.close(self._out)
            raise ControlError(
                f"cannot run {argv[0]}: {error.strerror}", remedy="check that it is installed"
            ) from error
        finally:
            os.close(stdin)
            os.close(child_out)
        self._loop.add_reader(self._out, self._read)
        self._loop.add_reader(self._pidfd, self._process_exited)

    def _read(self) -> None:
        try:
            data = os.read(self._out, 1 << 16)
        except BlockingIOError:
            return
        self._output += data
        if not data:
            self._loop.remove_reader(self._out)
        elif len(self._output) > OUTPUT_LIMIT and not self.ended.done():
            self.ended.set_exception(
                ControlError(
                    f"{self._name} printed more than {OUTPUT_LIMIT} bytes",
                    remedy="check that it is the stock binary",
                )
            )

    def _process_exited(self) -> None:
        before = -1
        while before < len(self._output) <= OUTPUT_LIMIT:
            before = len(self._output)
            self._read()
        status = self._process.wait()
        if not self.ended.done():
            self.ended.set_result(Finished(status, text_of(bytes(self._output))))
        self._loop.remove_reader(self._out)
        self._loop.remove_reader(self._pidfd)
        os.close(self._out)
        os.close(self._pidfd)
        self._exited.set()

    async def abandon(self) -> None:
        """Kill and reap a running command. One that is stuck in the kernel is reaped when it ends."""
        if self._exited.is_set():
            return
        # The leader of the group is not reaped yet, so its pid has not been reused.
        os.killpg(self._process.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(DEATH_PATIENCE_S):
                await self._exited.wait()
        except TimeoutError:
            pass


def _pidfd_of(process: subprocess.Popen[bytes]) -> int:
    try:
        return os.pidfd_open(process.pid)
    except OSError:
        process.kill()
        process.wait()
        raise


def _filled_pipe(text: str) -> int:
    """Return the read end of a pipe that holds the text and then ends. Commands are one line, so it fits."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        os.set_blocking(writer, False)
        data = text.encode()
        if os.write(writer, data) != len(data):
            raise ControlError("the command is longer than 64 KiB")
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return reader
