"""A process held by pidfd: the number can be used again, the descriptor never names another process."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
from types import TracebackType
from typing import Self

from mpsd.errors import AmbiguousError, BusyError, DeniedError, MpsdError, NotFoundError
from mpsd.linux import procfs
from mpsd.model import ProcessInstance


class Pinned:
    """One life of one process. Its fileno() (the pidfd) is readable once the process has ended.

    exec does not end a process and does not show here (see procs.ExecIdentity); forked children
    are other processes.
    """

    def __init__(self, instance: ProcessInstance, pidfd: int) -> None:
        self.instance = instance
        self._pidfd = pidfd

    @classmethod
    def open(cls, pid: int, start_ticks: int | None = None) -> Self:
        """Pin a process, of a given life if `start_ticks` is given.

        Raises NotFoundError when there is no such process, AmbiguousError when the pid belongs to
        another life by now, DeniedError without the rights, BusyError where that cannot be told now.
        """
        pidfd = -1
        try:
            before = procfs.start_ticks(pid)
            pidfd = os.pidfd_open(pid)
            # The same start time on both sides of the open: the descriptor is of that life.
            if procfs.start_ticks(pid) != before or start_ticks not in (None, before):
                raise AmbiguousError(
                    f"process {pid} is not the one that was meant: the pid was used again",
                    remedy="look it up again",
                )
            return cls(ProcessInstance(pid, before), pidfd)
        except BaseException as error:
            if pidfd >= 0:
                os.close(pidfd)
            raise _translated(pid, error) from error

    @classmethod
    def living(cls, process: ProcessInstance) -> Self | None:
        """Pin that life of a process; None once it has ended, or where it may not be looked at.

        Raises BusyError where the living cannot be told from the dead now.
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
        """False once the process has ended, even before its parent has reaped it."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to this very process. False when it has ended. Raises DeniedError."""
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        except PermissionError as error:
            raise DeniedError(f"may not signal process {self.pid}", remedy="run as root") from error
        return True

    async def ended(self, deadline_s: float) -> bool:
        """Wait for the end of the process; False when it has not come in time."""
        if not self.alive():
            return True
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        # A descriptor of our own: the loop allows one reader for each, and the owner may have one on ours.
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
            return DeniedError(f"may not look at process {pid}", remedy="run as root")
        case OSError(errno=errno.EINVAL):
            # A thread that does not lead its group.
            return NotFoundError(f"{pid} is not a process: {error.strerror}")
        case OSError():
            return BusyError(
                f"cannot look at process {pid}: {error.strerror}",
                remedy="let mpsd have more open files (LimitNOFILE) and memory",
            )
        case _:
            return error
