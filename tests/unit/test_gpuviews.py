"""Status shows the GPUs in time, even if a process on them, or NVML, hangs."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence

import pytest

from mpsd.api import gpuviews
from mpsd.api.gpuviews import GpuViews
from mpsd.base.model import GpuProcess, ProcessFacts
from mpsd.os import processes as procs
from tests.support.devices import GPU, OneGpu

RUN = "/run/mpsd"


class Devices(OneGpu):
    """NVML. `answers`: cleared, it hangs."""

    def __init__(self, *processes: GpuProcess) -> None:
        super().__init__(*processes)
        self.answers = threading.Event()
        self.answers.set()

    def processes(self, gpu_uuid: str) -> Sequence[GpuProcess]:
        assert self.answers.wait(10)
        return super().processes(gpu_uuid)


def test_a_process_whose_command_line_cannot_be_read_holds_up_neither_loop_nor_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpuviews, "FACTS_DEADLINE_S", 0.05)
    free = threading.Event()
    real = procs.facts
    looked: list[int] = []

    def hangs(pid: int, command: str | None = None) -> ProcessFacts:
        if command is None:
            assert threading.current_thread() is not threading.main_thread()
            looked.append(pid)
        assert pid != os.getpid() or command is not None or free.wait(10)
        return real(pid, command)

    monkeypatch.setattr(procs, "facts", hangs)

    async def run() -> None:
        pids = (os.getpid(), os.getppid(), (1 << 22) + 1, 1)
        views = GpuViews(Devices(*(GpuProcess(p, 1, p == 1) for p in pids)), [GPU], lambda: (), RUN)
        for _ in range(2):
            (view,) = await views.now()
            assert set(view.other_processes) == {os.getpid(), os.getppid()}
            assert view.other_processes[os.getpid()].command == "[not readable in time]"
            assert view.other_processes[os.getppid()].command == real(os.getppid()).command
            if views._probing is not None:
                await views._probing
        # The second round did not probe again while the first probe hung.
        assert looked.count(os.getpid()) == 1
        free.set()
        views.close()

    asyncio.run(run())


def test_nvml_that_hangs_is_waited_for_once_and_then_the_last_answer_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpuviews, "FIRST_REPLY_WAIT_S", 0.01)

    async def run() -> None:
        devices = Devices(GpuProcess(os.getpid(), 1, False))
        devices.answers.clear()
        views = GpuViews(devices, [GPU], lambda: {os.getpid()}, RUN)
        (view,) = await views.now()
        assert view.problem == "NVML has not answered yet"
        devices.answers.set()
        assert views._probing is not None
        await views._probing
        (view,) = await views.now()
        assert not view.problem and not view.other_processes
        devices.answers.clear()
        assert await views.now() == [view]
        devices.answers.set()
        assert views._probing is not None
        await views._probing
        views.close()

    asyncio.run(run())
