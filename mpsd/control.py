"""The stock control binary, driven for one fault domain: started, asked, adopted, ended.

One nvidia-cuda-mps-control in the foreground owns one pipe directory. It is started in a session of
its own and outlives mpsd; the next mpsd adopts it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Self

from mpsd import controltext, pipedir
from mpsd.controlcommands import ControlCommands, ControlGoneError
from mpsd.controltext import TerminateOutcome, TerminateReply
from mpsd.errors import (
    AlreadyRunningError,
    AmbiguousError,
    ConfigError,
    ControlError,
    DeadlineError,
    DeniedError,
    NotFoundError,
)
from mpsd.linux import inotify, procfs
from mpsd.linux.pinned import Pinned
from mpsd.model import ProcessInstance, ServerState
from mpsd.text import printable

__all__ = ["ControlCommands", "ControlDaemon", "ControlGoneError", "TerminateOutcome", "TerminateReply"]

# In the foreground the stock daemon writes its log, and that of its servers, to stdout instead of
# the files it keeps as a daemon: so stdout is the file in which everybody looks for it.
OUTPUT_FILE = "control.log"
MULTIUSER = "-multiuser-server"
_RETRY_S = 0.005


class ControlDaemon(ControlCommands):
    """One control daemon as a process: `start` it or `adopt` one; closing this object leaves it running."""

    _process: Pinned | None = None
    _child: subprocess.Popen[bytes] | None = None

    @property
    def instance(self) -> ProcessInstance | None:
        return self._process.instance if self._process else None

    def fileno(self) -> int:
        """A descriptor that is readable once the control daemon has ended."""
        return self._running().fileno()

    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    async def start(
        self, deadline_s: float = 5.0, *, multiuser: bool = False, private_to: int | None = None
    ) -> None:
        """Start the daemon and return when it answers.

        `multiuser` lets one server take clients of every user (MPS guide, -multiuser-server); without it a
        user's clients wait until those of the one before have gone. `private_to`: see pipedir.prepare.
        Its stdin is /dev/null and its output control.log in the log directory, so that the death of this
        process cannot hurt it. Raises ConfigError (directories, path length), AlreadyRunningError,
        ControlError (it ended, with its last words), DeadlineError (it has been killed).
        """
        pipedir.prepare(self.pipe_dir, self.log_dir, private_to)
        pipedir.clear_stale(self.pipe_dir)
        watch = inotify.DirectoryWatch(self.pipe_dir, inotify.CREATE | inotify.ATTRIB | inotify.MOVED_TO)
        try:
            self._spawn(*((MULTIUSER,) if multiuser else ()))
            async with asyncio.timeout(deadline_s):
                await self._ready(watch)
        except TimeoutError:
            await self.kill()
            raise DeadlineError(
                f"{self.binary} -f did not answer in {self.pipe_dir} within {deadline_s:g} s",
                remedy=f"read {self._output_path()}",
            ) from None
        except BaseException:
            if self._process:
                await self.kill()
            raise
        finally:
            watch.close()

    @classmethod
    def adopt(
        cls,
        binary: str,
        pipe_dir: str,
        log_dir: str,
        instance: ProcessInstance,
        *,
        gpus: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Take over a daemon that is already running, proven by start time, executable and pipe directory.

        Raises NotFoundError when it has ended, AmbiguousError when the process is another one.
        """
        control = cls(binary, pipe_dir, log_dir, gpus=gpus, environment=environment)
        process = Pinned.open(instance.pid, instance.start_ticks)
        try:
            control._prove(instance.pid)
            if not process.alive():
                raise NotFoundError(f"control daemon {instance} has ended")
        except BaseException:
            process.close()
            raise
        control._process = process
        return control

    async def ended(self, deadline_s: float) -> bool:
        """Wait for the end of the daemon and reap it if it is our child. False at the deadline."""
        ended = await self._running().ended(deadline_s)
        if ended:
            self.reap()
        return ended

    def reap(self) -> int | None:
        """The exit status of our own child once it has ended, else None. Leaves no zombie."""
        if self._child is None:
            return None
        status = self._child.poll()
        if status is not None and self._child in _CHILDREN:
            _CHILDREN.remove(self._child)
        return status

    def server_instances(self) -> tuple[ProcessInstance, ...]:
        """The MPS servers of this daemon as /proc shows them: its living children, asked of nobody."""
        if self._process is None:
            return ()
        found = []
        for pid in procfs.children(self._process.pid):
            try:
                stat = procfs.stat(pid)
            except (FileNotFoundError, ProcessLookupError):
                continue
            if stat.ppid == self._process.pid and stat.state not in "ZX":
                found.append(ProcessInstance(pid, stat.start_ticks))
        return tuple(found)

    async def wait_active(self, deadline_s: float) -> int:
        """Wait until a server is ACTIVE; its pid. Raises DeadlineError."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while (left := end - loop.time()) > 0:
            for server in await self.servers(left):
                if await self.server_state(server, max(end - loop.time(), 0)) is ServerState.ACTIVE:
                    return server
            await asyncio.sleep(_RETRY_S)
        raise DeadlineError(f"no server in {self.pipe_dir} became ACTIVE within {deadline_s:g} s")

    async def quit(self, timeout_s: float) -> None:
        """End the daemon in the orderly way and wait until it is gone. Raises DeadlineError: then kill()."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        try:
            await self.command("quit", timeout_s)
        except (ControlGoneError, DeadlineError):
            # Already on its way out, or held by its clients: its process decides which.
            pass
        if not await self.ended(max(end - loop.time(), 0)):
            raise DeadlineError(
                f"control daemon {self.instance} did not quit within {timeout_s:g} s",
                remedy="its clients hold it: end them, or end the domain by force",
            )

    async def kill(self, patience_s: float = 2.0) -> bool:
        """End the daemon and its servers by SIGKILL. False if the daemon is still there after the patience.

        The servers' clients lose their contexts: only for a domain that is empty or given up.
        """
        servers = self.server_instances()
        # The daemon first: it would replace a server that dies under it.
        self._running().signal(signal.SIGKILL)
        for server in servers:
            try:
                with Pinned.open(server.pid, server.start_ticks) as pinned:
                    pinned.signal(signal.SIGKILL)
            except (NotFoundError, AmbiguousError):
                continue
        return await self.ended(patience_s)

    def close(self) -> None:
        """Let go of the process without ending it."""
        self.reap()
        if self._process is not None:
            self._process.close()
            self._process = None

    def _running(self) -> Pinned:
        if self._process is None:
            raise ControlError(f"the control daemon of {self.pipe_dir} was not started")
        return self._process

    def _output_path(self) -> str:
        return os.path.join(self.log_dir, OUTPUT_FILE)

    def _spawn(self, *flags: str) -> None:
        environment = dict(self.environment)
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            out = os.open(self._output_path(), mode, 0o640)
        except OSError as error:
            raise ConfigError(
                f"cannot write {self._output_path()}: {error.strerror}", remedy="fix its rights"
            ) from error
        try:
            self._child = subprocess.Popen(
                [self.binary, "-f", *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
                close_fds=True,
                cwd="/",
            )
        except OSError as error:
            raise ControlError(
                f"cannot run {self.binary}: {error.strerror}", remedy="is it installed?"
            ) from error
        finally:
            os.close(out)
        _CHILDREN.append(self._child)
        self._process = Pinned.open(self._child.pid)

    async def _ready(self, watch: inotify.DirectoryWatch) -> None:
        """Until a command is answered: woken by the directory and by the child's end, not by the clock."""
        changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        descriptors = (os.dup(self._running().fileno()), watch.fileno())
        for fd in descriptors:
            loop.add_reader(fd, changed.set)
        try:
            while not await self._answers():
                # A bound socket that does not listen yet gives no further sign: then a short wait it is.
                bound = os.path.exists(pipedir.socket_path(self.pipe_dir))
                try:
                    async with asyncio.timeout(_RETRY_S if bound else None):
                        await changed.wait()
                except TimeoutError:
                    pass
                changed.clear()
                watch.drain()
        finally:
            for fd in descriptors:
                loop.remove_reader(fd)
            os.close(descriptors[0])

    async def _answers(self) -> bool:
        if not self.alive():
            raise self._obituary()
        if not os.path.exists(pipedir.socket_path(self.pipe_dir)):
            return False
        try:
            await self.default_active_thread_percentage()
        except ControlGoneError:
            return False
        return True

    def _obituary(self) -> ControlError | AlreadyRunningError:
        status = self.reap()
        try:
            with open(self._output_path(), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 1024))
                words = printable(procfs.text_of(file.read()).strip(), 1024)
        except OSError:
            words = ""
        if controltext.already_running(words):
            return AlreadyRunningError(
                f"another control daemon owns {self.pipe_dir}", remedy="adopt it or stop it"
            )
        full = next((d for d in (self.log_dir, self.pipe_dir) if not words and _full(d)), None)
        remedy = "mpsd-ctl doctor"
        if full is not None:
            words, remedy = f"no space is left in {full}", "make room there"
        return ControlError(
            f"{self.binary} -f ended at once with status {status}: {words or 'it said nothing'}",
            remedy=remedy,
        )

    def _prove(self, pid: int) -> None:
        try:
            program = procfs.exe_path(pid)
            # A script (the simulated stand-in) runs under its interpreter and shows in the arguments.
            arguments = procfs.command_line(pid)
            pipe = procfs.environment(pid).get("CUDA_MPS_PIPE_DIRECTORY", "")
            owner = int(procfs.status_fields(pid)["Uid"].split()[0])
        except (FileNotFoundError, ProcessLookupError) as error:
            raise NotFoundError(f"there is no process {pid}") from error
        except PermissionError as error:
            raise DeniedError(f"may not look at process {pid}", remedy="run as root") from error
        # By its name alone: an update of the driver lets the path lead to another file.
        names = {os.path.basename(name) for name in (program, *arguments[:3])}
        wanted = {os.path.basename(self.binary), os.path.basename(os.path.realpath(self.binary))}
        # Without -f or -d it is the prompt of the same name, which somebody asks another daemon with.
        serves = {"-f", "-d"} & set(arguments)
        if not names & wanted or not serves or owner != os.getuid():
            raise AmbiguousError(
                f"process {pid} is no control daemon of ours: it runs {printable(program)} for uid {owner}",
                remedy="nothing was done to it",
            )
        if os.path.realpath(pipe) != os.path.realpath(self.pipe_dir):
            raise AmbiguousError(
                f"control daemon {pid} serves {printable(pipe)}, not {self.pipe_dir}",
                remedy="nothing was done to it",
            )


def _full(directory: str) -> bool:
    """Whether not even one block more fits there."""
    try:
        info = os.statvfs(directory)
    except OSError:
        return False
    return info.f_bfree == 0 or (os.geteuid() != 0 and info.f_bavail == 0)


# Children outlive the objects that started them: kept here until reaped.
_CHILDREN: list[subprocess.Popen[bytes]] = []
