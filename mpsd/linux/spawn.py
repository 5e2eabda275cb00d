"""Run a short command from the event loop: text in, text out, dead at its deadline.

One vfork and exec, no thread, no child watcher: a pidfd says when the command ended, and output
is read until then, so a grandchild that keeps the pipe open delays nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpsd.errors import ControlError, DeadlineError
from mpsd.linux.procfs import text_of

OUTPUT_LIMIT = 1 << 20
DEATH_PATIENCE_S = 0.5


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended: negative status for a signal, as in subprocess."""

    status: int
    output: str


async def run(
    argv: Sequence[str], *, text: str = "", environment: Mapping[str, str], deadline_s: float
) -> Finished:
    """Run argv with `text` on stdin, stdout and stderr captured together.

    Raises DeadlineError when it has not ended in time, ControlError when it cannot be started or
    prints more than 1 MiB; in both cases its whole process group has been killed.
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
        self._gone = asyncio.Event()
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
            # The child's end must block: O_NONBLOCK belongs to the open file, and each end has its own.
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
                f"cannot run {argv[0]}: {error.strerror}", remedy="is it installed?"
            ) from error
        finally:
            os.close(stdin)
            os.close(child_out)
        self._loop.add_reader(self._out, self._read)
        self._loop.add_reader(self._pidfd, self._dead)

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
                    f"{self._name} printed more than {OUTPUT_LIMIT} bytes", remedy="is it the stock binary?"
                )
            )

    def _dead(self) -> None:
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
        self._gone.set()

    async def abandon(self) -> None:
        """Kill what still runs and reap it; one stuck in the kernel is reaped when it comes out."""
        if self._gone.is_set():
            return
        # The group's leader is not reaped yet, so the number is still its own.
        os.killpg(self._process.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(DEATH_PATIENCE_S):
                await self._gone.wait()
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
    """The reading end of a pipe that holds the text and then ends. The text fits: commands are one line."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        os.set_blocking(writer, False)
        data = text.encode()
        if os.write(writer, data) != len(data):
            raise ControlError("a command of more than 64 KiB")
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return reader
