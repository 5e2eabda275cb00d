"""The stock control binary of one fault domain: started, queried, adopted, ended.

One nvidia-cuda-mps-control in the foreground owns one pipe directory. It runs in a session of its own and
outlives mpsd; the next mpsd adopts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Self

from mpsd.base.errors import (
    AlreadyRunningError,
    AmbiguousError,
    ConfigError,
    ControlError,
    DeadlineError,
    DeniedError,
    NotFoundError,
)
from mpsd.base.model import ProcessInstance, ServerState
from mpsd.base.text import printable
from mpsd.mps import answers, pipedir
from mpsd.mps.answers import TerminateOutcome, TerminateReply
from mpsd.mps.commands import ControlCommands, ControlGoneError
from mpsd.os import inotify, procfs
from mpsd.os.pinned import Pinned

__all__ = ["ControlCommands", "ControlDaemon", "ControlGoneError", "TerminateOutcome", "TerminateReply"]

# In the foreground the stock daemon writes its log, and that of its servers, to stdout instead of the files
# that it keeps as a daemon. Stdout therefore is the file where operators look for the log.
OUTPUT_FILE = "control.log"
MULTIUSER = "-multiuser-server"
_RETRY_S = 0.005
_ENDING_S = 0.5


class ControlDaemon(ControlCommands):
    """One control daemon process: `start` or `adopt` it. Closing this object leaves the process running."""

    _process: Pinned | None = None
    _child: subprocess.Popen[bytes] | None = None

    @property
    def instance(self) -> ProcessInstance | None:
        return self._process.instance if self._process else None

    def fileno(self) -> int:
        """Return a descriptor that is readable once the control daemon has ended."""
        return self._running().fileno()

    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    async def start(
        self, deadline_s: float = 5.0, *, multiuser: bool = False, private_to: int | None = None
    ) -> None:
        """Start the daemon and return when it answers.

        `multiuser` lets one server take clients of every user (MPS guide, -multiuser-server). Without it the
        clients of a user wait until those of the previous user have left. `private_to`: see pipedir.prepare.
        Stdin is /dev/null and the output goes to control.log in the log directory, so the daemon survives the
        death of this process. Raises ConfigError (directories, path length), AlreadyRunningError,
        ControlError (the daemon ended; with its last output), DeadlineError (the daemon has been killed).
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
        """Take over a running daemon, proven by its start time, executable and pipe directory.

        Raises NotFoundError when it has ended, AmbiguousError when the process is a different one.
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
        """Wait for the end of the daemon and reap it if it is a child. Returns False at the deadline."""
        ended = await self._running().ended(deadline_s)
        if ended:
            self.reap()
        return ended

    def reap(self) -> int | None:
        """Return the exit status of an own child once it has ended, else None. Leaves no zombie."""
        if self._child is None:
            return None
        status = self._child.poll()
        if status is not None and self._child in _CHILDREN:
            _CHILDREN.remove(self._child)
        return status

    def server_instances(self) -> tuple[ProcessInstance, ...]:
        """Return the MPS servers of this daemon, its living children in /proc, without a command to it."""
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
        """Wait until a server is ACTIVE and return its pid. Raises DeadlineError."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        with contextlib.suppress(DeadlineError):
            while (remaining := end - loop.time()) > 0:
                for server in await self.servers(remaining):
                    if await self.server_state(server, max(end - loop.time(), 0)) is ServerState.ACTIVE:
                        return server
                await asyncio.sleep(_RETRY_S)
        raise DeadlineError(
            f"no server in {self.pipe_dir} became ACTIVE within {deadline_s:g} s",
            remedy=f"read {self._output_path()}",
        )

    async def quit(self, timeout_s: float) -> None:
        """End the daemon in the orderly way and wait until it is gone. Raises DeadlineError: then kill()."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        try:
            await self.command("quit", timeout_s)
        except ControlGoneError:
            # The daemon is ending already, or its socket was removed and no command reaches it any more.
            end = min(end, loop.time() + _ENDING_S)
        except DeadlineError:
            # Its clients hold it: the state of its process decides.
            pass
        if not await self.ended(max(end - loop.time(), 0)):
            raise DeadlineError(
                f"control daemon {self.instance} did not quit within {timeout_s:g} s",
                remedy="end its clients, or end the domain by force",
            )

    async def kill(self, patience_s: float = 2.0) -> bool:
        """End the daemon and its servers by SIGKILL. Returns False if the daemon outlives the patience.

        The servers' clients lose their contexts: use it only for a domain that is empty or abandoned.
        """
        servers = self.server_instances()
        # Kill the daemon first: it would replace a server that dies under it.
        self._running().signal(signal.SIGKILL)
        for server in servers:
            try:
                with Pinned.open(server.pid, server.start_ticks) as pinned:
                    pinned.signal(signal.SIGKILL)
            except (NotFoundError, AmbiguousError):
                continue
        return await self.ended(patience_s)

    def close(self) -> None:
        """Close the descriptors of the process without ending it."""
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
                f"cannot write {self._output_path()}: {error.strerror}", remedy="fix its permissions"
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
                # Clients of other users need its files, whatever the umask of mpsd.
                umask=0o022,
            )
        except OSError as error:
            raise ControlError(
                f"cannot run {self.binary}: {error.strerror}", remedy="check that it is installed"
            ) from error
        finally:
            os.close(out)
        _CHILDREN.append(self._child)
        self._process = Pinned.open(self._child.pid)

    async def _ready(self, watch: inotify.DirectoryWatch) -> None:
        """Wait until a command is answered, woken by the directory and the end of the child, not a timer."""
        changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        descriptors = (os.dup(self._running().fileno()), watch.fileno())
        for fd in descriptors:
            loop.add_reader(fd, changed.set)
        try:
            while not await self._answers():
                # A bound socket that does not listen yet gives no further sign, so wait for a short time.
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
        if answers.already_running(words):
            return AlreadyRunningError(
                f"another control daemon owns {self.pipe_dir}", remedy="adopt it or stop it"
            )
        full = next((d for d in (self.log_dir, self.pipe_dir) if not words and _full(d)), None)
        remedy = "mpsd-ctl doctor"
        if full is not None:
            words, remedy = f"no space is left in {full}", "free disk space there"
        return ControlError(
            f"{self.binary} -f ended at once with status {status}: {words or 'no output'}",
            remedy=remedy,
        )

    def _prove(self, pid: int) -> None:
        try:
            program = procfs.exe_path(pid)
            # A script (the simulated control binary) runs under its interpreter; its name is in the
            # arguments.
            arguments = procfs.command_line(pid)
            pipe = procfs.environment(pid).get("CUDA_MPS_PIPE_DIRECTORY", "")
            owner = int(procfs.status_fields(pid)["Uid"].split()[0])
        except (FileNotFoundError, ProcessLookupError) as error:
            raise NotFoundError(f"there is no process {pid}") from error
        except PermissionError as error:
            raise DeniedError(f"no permission to inspect process {pid}", remedy="run mpsd as root") from error
        # Compare the name alone: after a driver update the path leads to another file.
        names = {os.path.basename(name) for name in (program, *arguments[:3])}
        wanted = {os.path.basename(self.binary), os.path.basename(os.path.realpath(self.binary))}
        # Without -f or -d the binary is an interactive prompt, perhaps connected to another daemon.
        serves = {"-f", "-d"} & set(arguments)
        if not names & wanted or not serves or owner != os.getuid():
            raise AmbiguousError(
                f"process {pid} is not mpsd's control daemon: it runs {printable(program)} for uid {owner}",
                remedy="mpsd leaves the process alone",
            )
        if os.path.realpath(pipe) != os.path.realpath(self.pipe_dir):
            raise AmbiguousError(
                f"control daemon {pid} serves {printable(pipe)}, not {self.pipe_dir}",
                remedy="mpsd leaves the process alone",
            )


def _full(directory: str) -> bool:
    """Return whether the file system has no free block left."""
    try:
        info = os.statvfs(directory)
    except OSError:
        return False
    return info.f_bfree == 0 or (os.geteuid() != 0 and info.f_bavail == 0)


# Children outlive the objects that started them. They are kept here until reaped.
_CHILDREN: list[subprocess.Popen[bytes]] = []
