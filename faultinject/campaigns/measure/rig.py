"""Domains, client processes and recorders for the measurements. Everything has a deadline.

Times are CLOCK_MONOTONIC seconds, the same clock in every process of a node.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpsd.base.errors import DeadlineError, GpuError
from mpsd.base.model import ProcessInstance
from mpsd.gpu.nvidia.uvm import NvidiaUvm, UvmAddressSpace

CONTROL = "nvidia-cuda-mps-control"
now = time.monotonic


class Recorder:
    """Samples named values on threads and keeps only the changes: name -> [(time, value)]."""

    def __init__(self) -> None:
        self.changes: dict[str, list[tuple[float, Any]]] = {}
        self.samples: dict[str, int] = {}
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def every(self, interval_s: float, name: str, probe: Callable[[], Any]) -> None:
        """Call `probe` every `interval_s` until close(). An exception is a value, too."""
        self.changes[name] = []
        self.samples[name] = 0
        thread = threading.Thread(target=self._run, args=(interval_s, name, probe), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, interval_s: float, name: str, probe: Callable[[], Any]) -> None:
        children = self.changes[name]
        while not self._stop.is_set():
            try:
                value = probe()
            except Exception as error:
                value = f"{type(error).__name__}: {error}"
            self.samples[name] += 1
            if not children or children[-1][1] != value:
                children.append((now(), value))
            self._stop.wait(interval_s)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(8)


class Lines:
    """Follows a growing text file on a thread; remembers each line with its time of arrival."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[tuple[float, str]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rest = b""
        with Inotify(self.path) as watch, self.path.open("rb") as stream:
            while True:
                ended = self._stop.is_set()
                rest += stream.read()
                *whole, rest = rest.split(b"\n")
                self.lines += [(now(), line.decode(errors="replace")) for line in whole]
                if ended:
                    return
                watch.wait(0.05)

    def since(self, moment: float) -> list[tuple[float, str]]:
        return [(t, line) for t, line in self.lines if t >= moment]

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2)


class Inotify:
    """Wakes when a file is written (inotify(7))."""

    _IN_MODIFY, _IN_CLOEXEC = 0x2, 0o2000000

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = int(libc.inotify_init1(self._IN_CLOEXEC))
        if self._fd < 0 or libc.inotify_add_watch(self._fd, str(path).encode(), self._IN_MODIFY) < 0:
            raise OSError(ctypes.get_errno(), f"inotify on {path}")

    def __enter__(self) -> Inotify:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def wait(self, timeout_s: float) -> None:
        if select.select([self._fd], [], [], timeout_s)[0]:
            os.read(self._fd, 4096)


class KernelMessages:
    """New lines of /dev/kmsg with their arrival time."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str]] = []
        self._fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(self._fd, 0, os.SEEK_END)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            select.select([self._fd], [], [], 0.05)
            while True:
                try:
                    text = os.read(self._fd, 8192).decode(errors="replace")
                except (BlockingIOError, BrokenPipeError):
                    break
                self.lines.append((now(), text.split("\n")[0]))

    def since(self, moment: float) -> list[tuple[float, str]]:
        return [(t, line) for t, line in self.lines if t >= moment]

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2)
        os.close(self._fd)


class Client:
    """A child process that speaks JSON lines. `death` is when its pidfd became readable."""

    def __init__(self, role: str, cubin: Path, *arguments: str, env: dict[str, str]) -> None:
        self.spawned = now()
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        command = [
            sys.executable,
            "-u",
            "-m",
            "faultinject.campaigns.measure.clients.roles",
            role,
            str(cubin),
            *arguments,
        ]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the client
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=env, text=True
        )
        self.pid = self.process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.death: float | None = None
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._watch_exit, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                event = {"ev": "text", "text": line.strip()[-300:]}
            with self._changed:
                self.events.append(event | {"seen": now()})
                self._changed.notify_all()

    def _watch_exit(self) -> None:
        fd = os.dup(self.pidfd)
        select.select([fd], [], [], 120)
        self.death = now()
        os.close(fd)

    def instance(self) -> ProcessInstance:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return ProcessInstance(self.pid, int(fields[19]))

    def find(self, *names: str) -> dict[str, Any] | None:
        with self._changed:
            return next((event for event in self.events if event["ev"] in names), None)

    def wait(self, *names: str, timeout_s: float = 10) -> dict[str, Any]:
        """Return the first event of one of these names. Raises DeadlineError."""
        end = now() + timeout_s
        with self._changed:
            while True:
                for event in self.events:
                    if event["ev"] in names:
                        return event
                if now() >= end or (self.death and now() > self.death + 0.5):
                    raise DeadlineError(f"client said none of {names}: {self.events[-3:]} {self.stderr()}")
                self._changed.wait(min(0.2, max(0.0, end - now())))

    def forget(self) -> None:
        """Drop the events so far, so that the next wait() sees only new ones."""
        with self._changed:
            self.events.clear()

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()
        except OSError:
            pass

    def kill(self) -> float:
        """Send SIGKILL; return when."""
        moment = now()
        self.process.send_signal(signal.SIGKILL)
        return moment

    def stderr(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-400:].decode(errors="replace")

    def reap(self, timeout_s: float = 5) -> int | None:
        """Wait for the end, with SIGKILL if needed; return the status."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                return None
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                try:
                    stream.close()
                except OSError:
                    pass
        return self.process.returncode


class Domain:
    """One stock control daemon with its own directories under /tmp."""

    def __init__(self, name: str, *, start_server: bool = False) -> None:
        self.base = Path(tempfile.mkdtemp(prefix=f"mm-{name}-", dir="/tmp"))
        self.pipe, self.log = self.base / "p", self.base / "l"
        self._turn = threading.Lock()
        self.pipe.mkdir()
        self.log.mkdir()
        self.env = {
            **os.environ,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.log),
        }
        began = now()
        # In the foreground the daemon and its servers write their log to stdout, to no other file.
        with (self.base / "stdout").open("wb") as out:
            self.control = subprocess.Popen(
                [CONTROL, "-f"],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        while not (self.pipe / "control").exists():
            if now() - began > 5:
                self.control.kill()
                log_tail = (self.base / "stdout").read_text()[-400:]
                raise DeadlineError(
                    f"control daemon made no socket: {sorted(self.base.rglob('*'))} {log_tail}"
                )
            time.sleep(0.001)
        self.socket_after_s = now() - began
        self.log_lines = Lines(self.base / "stdout")
        if start_server:
            self.ctl("start_server -uid 0")

    def ctl(self, command: str, timeout_s: float = 3.0) -> str:
        """Return the reply of the control binary; "TIMEOUT" without one in time."""
        return self.ctl_full(command, timeout_s)[0]

    def ctl_full(self, command: str, timeout_s: float = 3.0) -> tuple[str, int | None, float]:
        """Return reply, exit status (None after a time-out) and seconds."""
        # The daemon serves one caller at a time and rejects the others.
        with self._turn:
            began = now()
            try:
                done = subprocess.run(
                    [CONTROL],
                    input=command + "\n",
                    env=self.env,
                    capture_output=True,
                    text=True,
                    timeout=timeout_s,
                )
            except subprocess.TimeoutExpired:
                return "TIMEOUT", None, now() - began
        return (done.stdout + done.stderr).strip("\n"), done.returncode, now() - began

    def server(self) -> int:
        """Return the pid of the server, 0 without one."""
        words = self.ctl("get_server_list").split()
        return int(words[0]) if words and words[0].isdecimal() else 0

    def client(self, role: str, cubin: Path, *arguments: str) -> Client:
        return Client(role, cubin, *arguments, env=self.env)

    def close(self) -> None:
        self.ctl("quit -t 1", 4)
        try:
            self.control.wait(3)
        except subprocess.TimeoutExpired:
            for pid in (self._server_pid_from_log(), self.control.pid):
                if pid:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except OSError:
                        pass
            self.control.wait(3)
        self.log_lines.close()

    def _server_pid_from_log(self) -> int:
        for _, line in reversed(self.log_lines.lines):
            words = line.split()
            if "NEW" in words and "SERVER" in words:
                pid = words[words.index("SERVER") + 1].rstrip(":")
                exe = Path(f"/proc/{pid}/cmdline")
                if exe.exists() and b"nvidia-cuda-mps-server" in exe.read_bytes():
                    return int(pid)
        return 0

    def keep_logs(self, out: Path) -> None:
        """Copy the logs to `out` and drop the directories."""
        out.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.base / "stdout", out / "log")
        shutil.rmtree(self.base, ignore_errors=True)


@contextmanager
def domain(name: str, out: Path, *, start_server: bool = False) -> Iterator[Domain]:
    """A domain that ends with the block; its logs go to out/logs/NAME."""
    mps_domain = Domain(name, start_server=start_server)
    try:
        yield mps_domain
    finally:
        mps_domain.close()
        mps_domain.keep_logs(out / "logs" / name)


@contextmanager
def clients(*started: Client) -> Iterator[list[Client]]:
    """Clients that are ended with the block."""
    children = list(started)
    try:
        yield children
    finally:
        for client in children:
            if client.process.poll() is None:
                client.kill()
        for client in children:
            client.reap()
            os.close(client.pidfd)


def attach(uvm: NvidiaUvm, client: Client, timeout_s: float = 3) -> UvmAddressSpace:
    """Open the client's address space, repeatedly until it is ready. Raises GpuError."""
    end = now() + timeout_s
    while True:
        try:
            return uvm.open(client.instance(), client.pidfd)[0]
        except GpuError:
            if now() > end:
                raise
            time.sleep(0.002)


def available_mib() -> int:
    """Return MemAvailable of the node."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) >> 10
    return 0


def relative(changes: list[tuple[float, Any]], zero: float) -> list[list[Any]]:
    """Return changes as [milliseconds after `zero`, value]."""
    return [[round((t - zero) * 1e3, 1), value] for t, value in changes]
