"""A real mpsd on a simulated node of its own, for tests to start, query and kill.

All files are in one short directory under /tmp, which every process of the node has in its command line or
environment; the close finds leftover processes by it. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

import psutil
import pytest

import mpsd_client
from mpsd.gpu.simulated import packets, paths
from mpsd.gpu.simulated.backend import stop_simulated
from mpsd.os import procfs
from tests.support.descriptors import open_descriptors

T = TypeVar("T")
Status = Mapping[str, Any]
DEADLINE_S = 60.0
POLL_S = 0.01
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "tests" / "support" / "simclient.py")
OTHER_UID = 65534
DEFAULTS = MappingProxyType({"protect": "", "domains.start": ""})
"""Settings of a site whose daemon protects, and starts servers, as one without a configuration file does."""


def until(look: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Return the result of `look`, as soon as it is true. AssertionError at the deadline."""
    end = time.monotonic() + deadline_s
    while not (found := look()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(POLL_S)
    return found


class Program:
    """A client process under a test's command; see tests/support/simclient.py."""

    def __init__(self, mode: str, environ: Mapping[str, str], uid: int | None = None) -> None:
        user = [] if uid in (None, os.geteuid()) else [str(uid)]
        self.process = subprocess.Popen(
            [sys.executable, "-IS", PROGRAM, mode, *user],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
        )
        self.pid: int = self.process.pid
        self._said = b""

    def hear(self, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Return the next line of its output; an empty one once it has ended."""
        assert self.process.stdout is not None
        end = time.monotonic() + deadline_s
        while b"\n" not in self._said:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"program {self.pid} said nothing within {deadline_s} s"
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                return {}
            self._said += part
        line, _, self._said = self._said.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def order(self, expression: str) -> None:
        """Send an expression without waiting for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(expression.encode() + b"\n")
        self.process.stdin.flush()

    def do(self, expression: str) -> dict[str, Any]:
        self.order(expression)
        return self.hear()

    def fault(self, kernel: str = "store") -> None:
        """Fault in one command, since mpsd may evict the program at once."""
        self.do(f"(dev.launch('{kernel}'), dev.synchronize())")

    def occupy(self) -> None:
        """Start a kernel that runs until Site.end_work()."""
        assert self.do("dev.launch('forever')") == {"result": None}

    def busy(self, seconds: float) -> None:
        """Start a kernel that runs for this long, from now on."""
        assert self.do(f"dev.launch('spin', duration_s={seconds})") == {"result": None}

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def die(self) -> None:
        self.process.kill()
        self.wait()

    def finish(self) -> dict[str, Any]:
        """End its input. Return its last line."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        last: dict[str, Any] = {}
        while said := self.hear():
            last = said
        self.wait()
        return last

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()


class Site:
    """A context manager. `settings`: dotted keys to TOML values, besides the directories; an empty one leaves
    the key out.

    The daemon is the plain one. Tests of the defaults pass **DEFAULTS.
    """

    def __init__(self, **settings: str) -> None:
        self._descriptors = open_descriptors()
        self.base = Path(tempfile.mkdtemp(prefix="mpt-", dir="/tmp"))
        self.base.chmod(0o755)
        self.settings = {key.replace("__", "."): value for key, value in settings.items()}
        self.run_dir = self.base / "r"
        self.log_dir = self.base / "l"
        self.state_dir = self.base / "s"
        self.node_dir = self.base / "n"
        self.config = self.base / "mpsd.toml"
        self.log = self.base / "mpsd.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.programs: list[Program] = []
        self._log_seen = 0
        self.write_config()

    # -- the daemon -------------------------------------------------------------------------------------

    def write_config(self, **more: str) -> None:
        self.settings |= {key.replace("__", "."): value for key, value in more.items()}
        top = {
            "backend": '"simulated"',
            "run_dir": f'"{self.run_dir}"',
            "log_dir": f'"{self.log_dir}"',
            "state_dir": f'"{self.state_dir}"',
            "simulated.dir": f'"{self.node_dir}"',
            "log.format": '"json"',
            # Tests of open domains say so, and tests of the vault and of fail-over.
            "domains.private": "true",
            "protect": '"observe"',
            "domains.start": '"at-once"',
        }
        lines = [f"{key} = {value}" for key, value in (top | self.settings).items() if value]
        self.config.write_text("\n".join(lines) + "\n")

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "mpsd", "run", "--config", str(self.config), *arguments]

    def environ(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG")}
        # Packages too: another interpreter of this version finds the same ones.
        found = [str(ROOT), str(ROOT / "clients"), sysconfig.get_path("purelib")]
        return {**kept, "PYTHONPATH": os.pathsep.join(found), "MPSD_TEST_BASE": str(self.base)}

    def launch(
        self,
        *arguments: str,
        python: Sequence[str] = (),
        uid: int | None = None,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> subprocess.Popen[bytes]:
        """Start the daemon's process and do not wait for it."""
        self._log_seen = self.log.stat().st_size if self.log.exists() else 0
        command = self.command(*arguments)
        if uid is not None:
            command[0] = interpreter_for(uid)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [command[0], *python, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self.environ(), **environ},
                user=uid,
                group=uid,
                extra_groups=None if uid is None else [],
                start_new_session=True,
                cwd="/",
            )
        return self.process

    def start(self, *arguments: str, **environ: str) -> Site:
        """Start the daemon and wait until it reports readiness."""
        self.launch(*arguments, environ=environ)
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        until(lambda: self.said("ready") or self._must_live(), "mpsd is ready")

    def _must_live(self) -> bool:
        assert self.process is not None
        status = self.process.poll()
        assert status is None, f"mpsd ended with status {status}: {self.tail()}"
        return False

    def said(self, event: str) -> list[dict[str, Any]]:
        """Return lines of the present daemon's log with this event."""
        with self.log.open("rb") as file:
            file.seek(self._log_seen)
            lines = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b"{")]
        return [found for found in map(json.loads, lines) if found.get("event") == event]

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """kill -9 of the daemon alone."""
        assert self.process is not None
        self.abandon()

    def abandon(self) -> None:
        """Kill the daemon, or reap one that has ended by itself."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
            self.process = None

    def terminate(self, number: int = signal.SIGTERM) -> int:
        """Send the daemon a signal. Return its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(DEADLINE_S)
        self.process = None
        return status

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop all threads of the daemon meanwhile (SIGSTOP)."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            until(lambda: set(procfs.thread_states(self.pid)) == {"T"}, "the daemon has stopped")
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    # -- talking to it ----------------------------------------------------------------------------------

    @property
    def socket(self) -> str:
        return str(self.run_dir / "mpsd.sock")

    def ask(self, op: Callable[[mpsd_client.Client], T], uid: int | None = None) -> T:
        """Make one request on a connection of its own, as user `uid` if given."""
        with as_user(uid), mpsd_client.connect(self.socket) as client:
            return op(client)

    def status(self) -> Status:
        return self.ask(lambda client: client.status())

    def until(self, holds: Callable[[Status], Any], what: str, deadline_s: float = DEADLINE_S) -> Status:
        """Return the first status for which `holds` is true."""

        def look() -> Status | None:
            found = self.status()
            return found if holds(found) else None

        found = until(look, what, deadline_s)
        assert found is not None
        return found

    def faults(self) -> Sequence[Mapping[str, Any]]:
        return self.ask(lambda client: client.faults())

    def until_fault(self, fault_class: str) -> Mapping[str, Any]:
        def look() -> Mapping[str, Any] | None:
            return next((f for f in self.faults() if f["class"] == fault_class), None)

        found = until(look, f"a record of {fault_class}")
        assert found is not None
        return found

    # -- clients ----------------------------------------------------------------------------------------

    def client_environ(self, uid: int | None = None, *, shared: bool = False) -> dict[str, str]:
        return self.environ() | self.ask(lambda client: client.env(shared=shared), uid)

    def program(
        self, mode: str = "obey", uid: int | None = None, environ: Mapping[str, str] | None = None
    ) -> Program:
        """Start a client and wait for its context. With `environ` it joins the domain given there."""
        chosen = self.client_environ(uid) if environ is None else dict(environ)
        started = Program(mode, chosen, uid)
        self.programs.append(started)
        first = started.hear()
        assert first.get("pid") == started.pid, first
        return started

    def attached(self, *programs: Program) -> Status:
        """Wait until all of these programs are attached."""
        pids = {p.pid for p in programs}

        def all_attached(status: Status) -> bool:
            return pids <= {c["pid"] for c in status["clients"] if c["state"] == "attached"}

        return self.until(all_attached, f"clients {sorted(pids)} are attached")

    def join(self, mode: str = "obey", uid: int | None = None) -> Program:
        program = self.program(mode, uid)
        if mode == "work":
            assert program.hear() == {"working": True}
        self.attached(program)
        return program

    def empty(self) -> None:
        """End every program and wait until the daemon has no client left, nor memory of exited clients."""
        for program in self.programs:
            program.close()
        self.programs.clear()
        self.until(lambda s: not s["clients"] and not s["dead"], "nobody is left")

    def gone(self, program: Program) -> Status:
        """Wait until the daemon holds nothing of the program."""
        return self.until(
            lambda s: program.pid not in {c["pid"] for c in (*s["clients"], *s["dead"])},
            f"client {program.pid} is forgotten",
        )

    # -- the node ---------------------------------------------------------------------------------------

    def node(self, **message: Any) -> dict[str, Any]:
        """Send the simulated GPU a query or a scripted fault."""
        with packets.connect(paths.gpu_socket(str(self.node_dir))) as sock:
            answer, fds = packets.call(sock, message)
        packets.close_all(fds)
        assert not answer.get("error"), answer
        return dict(answer)

    def end_work(self, program: Program) -> None:
        """End the kernel of a program, dead or alive, that runs until then (`forever`)."""
        self.node(op="inject", fault="end", pid=program.pid)

    def memory_used(self) -> int:
        return int(self.node(op="node")["gpus"][0]["used"])

    def control(self, domain: str, command: str) -> str:
        """Give the control daemon a command directly, without mpsd."""
        done = subprocess.run(
            [paths.launcher(str(self.node_dir), paths.CONTROL_NAME)],
            input=command + "\n",
            env=self.environ() | {"CUDA_MPS_PIPE_DIRECTORY": str(self.run_dir / "d" / domain)},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        return done.stdout.strip()

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Return living processes of this site with the word in their command line, except this one."""
        return [p for p in psutil.process_iter() if p.pid != os.getpid() and self._is_ours(p, word)]

    def _is_ours(self, process: psutil.Process, word: str) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            line = process.cmdline()
            if word and not any(word in part for part in line):
                return False
            known = [*line, *process.environ().values()]
        except psutil.Error:
            return False
        return any(str(self.base) in value for value in known)

    def keeper(self) -> psutil.Process | None:
        return next(iter(self.processes("/mpsd/fdstore/keeper.py")), None)

    # -- the end ----------------------------------------------------------------------------------------

    def close(self) -> list[str]:
        """End everything. Return a text on what had to be killed because it did not end by itself."""
        left = []
        for program in self.programs:
            program.close()
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                left.append(f"mpsd did not stop: {self.tail()}")
                self.process.kill()
                self.process.wait(DEADLINE_S)
        stop_simulated(self.node_dir)
        keeper = self.keeper()
        if keeper is not None:
            # By design the keeper stays for a while, with its descriptors.
            with contextlib.suppress(psutil.Error):
                keeper.kill()
        end = time.monotonic() + 5
        while (living := self.processes()) and time.monotonic() < end:
            time.sleep(POLL_S)
        for process in living:
            with contextlib.suppress(psutil.Error):
                left.append(f"orphan {process.pid}: {' '.join(process.cmdline())}")
                process.kill()
        shutil.rmtree(self.base, ignore_errors=True)
        open_now = open_descriptors()
        leaked = {fd: target for fd, target in open_now.items() if fd not in self._descriptors}
        return [*left, *(f"descriptor {fd} ({target}) is still open" for fd, target in leaked.items())]

    def __enter__(self) -> Site:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.log.exists():
            print(self.tail(), file=sys.stderr)
        left = self.close()
        assert not left or error is not None, left


@contextlib.contextmanager
def as_user(uid: int | None) -> Iterator[None]:
    """Be another user, by the kernel's credentials of connections that are made meanwhile."""
    if uid is None or uid == os.geteuid():
        yield
        return
    before = os.geteuid(), os.getegid()
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(before[0])
        os.setegid(before[1])


def interpreter_for(uid: int) -> str:
    """Return a Python of this version that the user may run; skip the test if there is none."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for candidate in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        try:
            subprocess.run([candidate, "-c", ""], user=uid, group=uid, extra_groups=[], cwd="/", check=True)
            return candidate
        except (OSError, subprocess.CalledProcessError):
            continue
    pytest.skip(f"no {version} that user {uid} may run")


def alive(pid: int) -> bool:
    """Return whether a process with this number runs (a zombie does not)."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def signal_all(programs: Sequence[Program], number: int = signal.SIGTERM) -> None:
    for program in programs:
        program.signal(number)
