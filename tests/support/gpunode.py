"""A GPU node for the contract tests: the same interface for the simulated and the real one.

`Machine` lives as long as the test session and keeps one healthy fault domain for all tests that leave it
usable. `Node` is one test's view; its close ends every process that the test started. Client programs are the
harness's own (faultinject.programs), real processes with a process group each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from faultinject.registry.history import History
from faultinject.rig import leftovers
from faultinject.rig.node import Node as HarnessNode
from faultinject.rig.node import open_node
from faultinject.rig.worker import Worker, python_environment
from mpsd.base.errors import MpsdError
from mpsd.base.model import Gpu, KernelXid, ServerState, UvmEvent
from mpsd.gpu.base import AddressSpace, Isolation, Tracker, WorkView
from mpsd.gpu.nvidia.kernel import NvidiaIsolation
from mpsd.gpu.simulated.kernelmodule import SimulatedIsolation
from mpsd.mps.control import ControlDaemon
from tests.support.descriptors import open_descriptors
from tests.support.program import Program
from tests.support.waiting import DEADLINE_S, readable, until

T = TypeVar("T")
MEMORY = 64 << 20
"""GPU memory of an offender [bytes]."""

_GOODBYE_S = 5.0
_HEALTHY_S = 5.0
_TAG = "MPSD_CONTRACT_TEST"


class Domain:
    """One control daemon on one GPU with directories under `base`."""

    def __init__(self, machine: Machine, base: Path) -> None:
        self.machine, self.base = machine, base
        self.control = ControlDaemon(
            machine.harness.backend.control_binary,
            str(base / "p"),
            str(base / "l"),
            gpus=(machine.gpu.uuid,),
            environment=machine.harness.environment,
        )
        self.server = 0
        self.spoilt = False
        """Set by a test after which no other test can use this domain."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment for clients of this domain."""
        return {"CUDA_MPS_PIPE_DIRECTORY": self.control.pipe_dir}

    def start(self) -> Self:
        """Start the control daemon and a server, and wait until the server is ACTIVE."""
        self.machine.run(self.control.start(DEADLINE_S))
        self.machine.run(self.control.start_server(os.getuid()))
        self.server = self.machine.run(self.control.wait_active(DEADLINE_S))
        return self

    def state(self) -> ServerState:
        return self.machine.run(self.control.server_state(self.server))

    def becomes(self, state: ServerState) -> None:
        until(lambda: self.state() is state, f"server {self.server} in {state}")

    def clients(self) -> set[int]:
        return set(self.machine.run(self.control.clients(self.server)))

    def healthy(self) -> bool:
        """Return whether the same server accepts clients, if need be after its recovery."""
        if self.spoilt or not self.control.alive():
            return False
        try:
            return self.machine.run(self.control.wait_active(_HEALTHY_S)) == self.server
        except MpsdError:
            return False

    def stop(self) -> None:
        """End the domain in order if possible, else by force."""
        if self.control.instance is None:
            return
        try:
            self.machine.run(self.control.quit(_GOODBYE_S))
        except MpsdError:
            self.machine.run(self.control.kill(DEADLINE_S))
        assert not self.control.alive()
        self.control.close()


class Machine:
    """A GPU node for a whole session, and a fault domain that tests share while it is healthy."""

    def __init__(self, backend: str) -> None:
        # Short, for socket paths must fit in 107 bytes.
        self.base = Path(tempfile.mkdtemp(prefix="mpsd-ct-", dir="/tmp"))
        self._runner = asyncio.Runner()
        self._tests = 0
        self._shared: Domain | None = None
        try:
            with warnings.catch_warnings():
                # Warnings of CUDA's Python binding are not ours to fix.
                warnings.simplefilter("ignore")
                self.harness: HarnessNode = open_node(backend, self.base)
        except BaseException:
            self._remove()
            raise
        self.backend = self.harness.backend
        self.gpu: Gpu = self.backend.devices.gpus()[0]
        # A descriptor that an adapter opens once and keeps is not a leak of the test.
        self.backend.devices.processes(self.gpu.uuid)
        self.backend.devices.watch_xids().close()

    def run(self, doing: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(doing)

    def next_directory(self) -> Path:
        self._tests += 1
        directory = self.base / f"t{self._tests}"
        directory.mkdir()
        return directory

    def shared_domain(self) -> Domain:
        """Return a domain with an ACTIVE server and no clients: the last test's if it is usable."""
        if self._shared is not None and not self._shared.healthy():
            self._shared.stop()
            self._shared = None
        if self._shared is None:
            base = self.next_directory()
            self._shared = Domain(self, base).start()
        return self._shared

    def isolation(self) -> Isolation | None:
        """Return another open file of the patched nvidia-uvm; None if the driver has none."""
        if self.backend.isolation is None:
            return None
        if isinstance(self.backend.isolation, NvidiaIsolation):
            return NvidiaIsolation()
        return SimulatedIsolation(self.harness.environment["MPSD_SIM_DIR"])

    def close(self) -> None:
        try:
            if self._shared is not None:
                self._shared.stop()
        finally:
            if self.backend.kernel_log is not None:
                self.backend.kernel_log.close()
            self.harness.close()
            left = leftovers.clear(self.base, _GOODBYE_S)
            self._remove()
        assert not left, left

    def _remove(self) -> None:
        self._runner.close()
        shutil.rmtree(self.base, ignore_errors=True)


class Node:
    """One test's view of a machine. `backend` is under test, `domain` is a started fault domain."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.backend = machine.backend
        self.gpu = machine.gpu
        self.real = machine.harness.bars
        self.busy_s = machine.harness.busy_s
        self.domain = machine.shared_domain()
        self.base = machine.next_directory()
        if self.backend.kernel_log is not None:
            self.backend.kernel_log.drain()
        self._history = History()
        self._programs: list[Program] = []
        self._domains: list[Domain] = []
        self._owned = contextlib.ExitStack()
        self._descriptors = open_descriptors()

    def run(self, doing: Coroutine[Any, Any, T]) -> T:
        return self.machine.run(doing)

    # -- programs ---------------------------------------------------------------------------------------

    def spawn(self, module: str, *args: str, environment: dict[str, str] | None = None) -> Program:
        """Start a program of the harness, a client of `domain` unless another environment is given."""
        joined = self.domain.environment if environment is None else environment
        everything = {**python_environment(), **self.machine.harness.environment, **joined}
        everything[_TAG] = str(self.base)
        arguments = [*args, "--backend", self.machine.harness.name]
        name = f"{module}-{len(self._programs)}"
        log = self.base / f"{name}.err"
        program = Program(Worker(name, module, arguments, everything, self._history, log))
        self._programs.append(program)
        return program

    def survivor(self, environment: dict[str, str] | None = None) -> Program:
        """Start a client that computes without end and checks its results. Not ready yet."""
        return self.spawn("survivor", environment=environment)

    def offender(self, kind: str, *args: str, environment: dict[str, str] | None = None) -> Program:
        """Start a client that is idle until told to go, and then causes this kind of fault. Not ready yet."""
        memory = ("--memory", str(MEMORY), "--busy-s", str(self.busy_s))
        return self.spawn("offender", kind, *memory, *args, environment=environment)

    def holder(self) -> Program:
        """Start a client that notices no fault and stays: a fault lasts until it exits. Ready."""
        return self.offender("clean_exit").ready()

    def bystander(self) -> subprocess.Popen[bytes]:
        """Start a process that does not use the GPU."""
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        )
        self._owned.callback(process.__exit__, None, None, None)
        self._owned.callback(process.kill)
        return process

    def new_domain(self) -> Domain:
        """Return a domain of this test's own, not started."""
        base = self.base / f"d{len(self._domains)}"
        base.mkdir()
        domain = Domain(self.machine, base)
        self._domains.append(domain)
        return domain

    # -- adapters ---------------------------------------------------------------------------------------

    def open(self, program: Program) -> AddressSpace:
        """Return the one address space of a client, closed at the end of the test."""
        (space,) = self.backend.uvm.open(program.instance, program.pinned.fileno())
        self._owned.callback(space.close)
        return space

    def restarted(self, space: AddressSpace) -> AddressSpace:
        """Return the space as the next daemon has it: from duplicates, the old holder's closed."""
        kept = duplicates(list(space.fds.items()))
        space.close()
        return self.adopt(kept)

    def adopt(self, fds: dict[str, int]) -> AddressSpace:
        space = self.backend.uvm.adopt(fds)
        self._owned.callback(space.close)
        return space

    def track(self, space: AddressSpace) -> Tracker:
        tracker = space.track()
        self._owned.callback(tracker.close)
        return tracker

    def inspect(self, program: Program) -> WorkView:
        """Return a view as a daemon has it: refreshed until two looks at the living client agree."""
        view = self.backend.work.open(program.instance, program.pinned.fileno())
        self._owned.callback(view.close)
        for _ in range(2):
            view.refresh()
        return view

    def adopt_work(self, program: Program, fds: dict[str, int]) -> WorkView:
        view = self.backend.work.adopt(program.instance, fds)
        self._owned.callback(view.close)
        return view

    def own(self, thing: contextlib.AbstractContextManager[T]) -> T:
        return self._owned.enter_context(thing)

    def xids(self, *numbers: int) -> list[KernelXid]:
        """Wait until the kernel log has shown all these numbers since the last call.

        Return every line of it.
        """
        log = self.backend.kernel_log
        assert log is not None, "this machine's kernel log may not be read"
        found: list[KernelXid] = []
        wanted = set(numbers)

        def complete() -> bool:
            found.extend(log.drain())
            return wanted <= {line.xid for line in found}

        until(complete, f"Xids {sorted(wanted)} in the kernel log")
        return found

    def memory_used(self) -> int:
        return self.backend.devices.memory_used(self.gpu.uuid)

    # -- the end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """End everything in order. No process and no descriptor may be left."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._nothing_left)
            for domain in self._domains:
                stack.callback(domain.stop)
            stack.callback(self._owned.close)
            for program in self._programs:
                stack.callback(program.close)
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        # A client that is killed while its kernel runs takes the shared domain with it.
        for program in self._programs:
            program.worker.tell("stop")
        for program in self._programs:
            if program.worker.wait("gone", timeout=_GOODBYE_S) is None:
                self.domain.spoilt = True

    def _nothing_left(self) -> None:
        processes = leftovers.clear(self.base, _GOODBYE_S)
        assert not processes, f"left behind: {processes}"
        try:
            until(lambda: not self._leaked(), "descriptors closed", _GOODBYE_S)
        except AssertionError:
            raise AssertionError(f"descriptors left open: {self._leaked()}") from None

    def _leaked(self) -> dict[int, str]:
        return {
            fd: path
            for fd, path in open_descriptors().items()
            if self._descriptors.get(fd) != path and not (self.real and _kept_by_nvml(path))
        }


def _kept_by_nvml(path: str) -> bool:
    """Return whether NVML may keep the device node open. Nodes of UVM belong to mpsd."""
    return path.startswith("/dev/nvidia") and not path.startswith("/dev/nvidia-uvm")


def next_event(tracker: Tracker) -> UvmEvent:
    """Wait on a tracker's descriptor for its next event, and return the event."""
    assert readable(tracker, DEADLINE_S), "the tracker has seen nothing"
    batch = tracker.drain()
    assert batch.dropped == 0
    assert batch.events, "readable, but nothing there"
    return batch.events[0]


def faulted_at(line: KernelXid) -> int:
    """Return the address in an MMU fault line; the driver prints it in two halves."""
    found = re.search(r"faulted @ 0x([0-9a-f]+)_([0-9a-f]{8})", line.text)
    assert found is not None, line.text
    return int(found[1], 16) << 32 | int(found[2], 16)


def duplicates(fds: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Return duplicates, as a descriptor store would pass them to the next daemon."""
    return {role: os.dup(fd) for role, fd in fds}
