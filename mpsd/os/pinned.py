"""A process held by pidfd. The kernel may reuse the pid; the descriptor never names another process."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
from types import TracebackType
from typing import Self

from mpsd.base.errors import AmbiguousError, BusyError, DeniedError, MpsdError, NotFoundError
from mpsd.base.model import ProcessInstance
from mpsd.os import procfs


class Pinned:
    """One instance of a process. Its fileno() (the pidfd) is readable once the process has ended.

    exec does not end a process and does not show here (see processes.ExecIdentity). Forked children are other
    processes.
    """

    def __init__(self, instance: ProcessInstance, pidfd: int) -> None:
        self.instance = instance
        self._pidfd = pidfd

    @classmethod
    def open(cls, pid: int, start_ticks: int | None = None) -> Self:
        """Pin a process; with `start_ticks` only the instance with that start time.

        Raises NotFoundError when there is no such process, AmbiguousError when the pid belongs to another
        process by now, DeniedError without the rights, BusyError when the kernel cannot answer now.
        """
        pidfd = -1
        try:
            before = procfs.start_ticks(pid)
            pidfd = os.pidfd_open(pid)
            # The start time is the same on both sides of the open: the descriptor is of that instance.
            if procfs.start_ticks(pid) != before or start_ticks not in (None, before):
                raise AmbiguousError(
                    f"process {pid} has ended, and its pid was used again by another process",
                    remedy="look up the pid again",
                )
            return cls(ProcessInstance(pid, before), pidfd)
        except BaseException as error:
            if pidfd >= 0:
                os.close(pidfd)
            raise _translated(pid, error) from error

    @classmethod
    def living(cls, process: ProcessInstance) -> Self | None:
        """Pin this instance of a process; None once it has ended, or when mpsd may not inspect it.

        Raises BusyError when it cannot be told whether the process has ended.
        """
        try:
            pinned = cls.open(process.pid, process.start_ticks)
        except BusyError:
            raise
        except MpsdError:
            return None
        if pinned.alive():
            return pinned
        pinned.close()
        return None

    @property
    def pid(self) -> int:
        return self.instance.pid

    def fileno(self) -> int:
        return self._pidfd

    def alive(self) -> bool:
        """Return False once the process has ended, even before its parent has reaped it."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to this very process. Returns False when it has ended. Raises DeniedError."""
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        except PermissionError as error:
            raise DeniedError(
                f"no permission to signal process {self.pid}", remedy="run mpsd as root"
            ) from error
        return True

    async def ended(self, deadline_s: float) -> bool:
        """Wait for the end of the process; return False when it has not ended in time."""
        if not self.alive():
            return True
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        # A duplicate: the loop allows one reader per descriptor, and the owner may have one on the original.
        pidfd = os.dup(self._pidfd)
        loop.add_reader(pidfd, event.set)
        try:
            async with asyncio.timeout(deadline_s):
                await event.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return True

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _translated(pid: int, error: BaseException) -> BaseException:
    match error:
        case MpsdError():
            return error
        case FileNotFoundError() | ProcessLookupError():
            return NotFoundError(f"there is no process {pid}")
        case PermissionError():
            return DeniedError(f"no permission to inspect process {pid}", remedy="run mpsd as root")
        case OSError(errno=errno.EINVAL):
            # The number names a thread that does not lead its group.
            return NotFoundError(f"{pid} is not a process: {error.strerror}")
        case OSError():
            return BusyError(
                f"cannot inspect process {pid}: {error.strerror}",
                remedy="allow mpsd more open files (LimitNOFILE) and more memory",
            )
        case _:
            return error
