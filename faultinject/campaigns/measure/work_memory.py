"""The GPU's writes into the memory of an exited client when its work ends.

The driver library waits for work on words in host memory that the GPU writes. A lease pins that memory, and a
/proc/PID/mem opened before the death still reads it afterwards.
"""

from __future__ import annotations

import gzip
import os
import threading
import time
from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.end_signal import Case
from faultinject.campaigns.measure.nvml import Nvml
from faultinject.campaigns.measure.rig import (
    Client,
    Domain,
    attach,
    clients,
    domain,
    now,
)
from mpsd.gpu.nvidia.uvm import NvidiaUvm

PAGE = 4096

CASES = (
    Case("single 0.6 s", "single", 0.6),
    Case("two streams 0.3 and 0.6 s", "two_streams", 0.6),
    Case("queued 0.4+0.2+0.2 s", "queued", 0.8),
    Case("graph 3 x 0.2 s", "graph", 0.6),
    Case("killed after its kernel ended", "single", 0.1, kill_after_s=0.4),
)


class MemoryWatch:
    """Words of a process's driver mappings that change, read through /proc/PID/mem.

    Opened before the process dies; works after its death as long as a lease pins its memory map.
    """

    pause_s = 0.002
    limit = 160 << 20
    keep = 400

    def __init__(self, pid: int) -> None:
        self._mem = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        self.areas = self._find(pid)
        self.changes: list[tuple[float, int, list[str]]] = []
        self.unreadable = 0
        self.scans = 0
        self._old: dict[int, bytes] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @staticmethod
    def _find(pid: int) -> list[tuple[int, int, str]]:
        areas = []
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            words = line.split(maxsplit=5)
            name = words[5] if len(words) > 5 else ""
            if "rw-s" in words[1]:
                begin, end = (int(word, 16) for word in words[0].split("-"))
                areas.append((begin, end - begin, name.split("/")[-1]))
        return areas

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            found = self._scan()
            self.scans += 1
            if found:
                self.changes.append((now(), len(found), found[: self.keep]))
            self._stop.wait(self.pause_s)

    def _scan(self) -> list[str]:
        found: list[str] = []
        budget = self.limit
        for begin, size, name in self.areas:
            # Mappings of the device node itself are registers and video memory: not for polling.
            if name == "nvidia0":
                continue
            size = min(size, budget)
            budget -= size
            try:
                data = os.pread(self._mem, size, begin) if size else b""
            except OSError:
                self.unreadable += 1
                continue
            old = self._old.get(begin)
            self._old[begin] = data
            if old is not None and old != data:
                found += self._differences(begin, name, old, data)
        return found

    @staticmethod
    def _differences(begin: int, name: str, old: bytes, data: bytes) -> list[str]:
        found = []
        for at in range(0, min(len(old), len(data)), PAGE):
            if old[at : at + PAGE] == data[at : at + PAGE]:
                continue
            for word in range(at, min(at + PAGE, len(data)), 4):
                was, is_ = old[word : word + 4], data[word : word + 4]
                if was != is_:
                    values = f"{int.from_bytes(was, 'little'):#x}->{int.from_bytes(is_, 'little'):#x}"
                    found.append(f"{name} {begin:#x}+{word:#x} {values}")
        return found

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident:
            self._thread.join(2)
        os.close(self._mem)

    def snapshot(self) -> bytes:
        """All areas as read last: "begin size name\\n" headers, each followed by its bytes."""
        parts = []
        for begin, size, name in self.areas:
            data = self._old.get(begin, b"")
            parts.append(f"{begin:#x} {len(data)} {size} {name}\n".encode() + data)
        return b"".join(parts)


def run_case(mps_domain: Domain, survivor: Client, cubin: Path, uvm: NvidiaUvm, case: Case, out: Path) -> Any:
    survivor.forget()
    worker = mps_domain.client("worker", cubin, str(mps_domain.base / "share"))
    with clients(worker):
        worker.wait("ready")
        space = attach(uvm, worker)
        watch = MemoryWatch(worker.pid)
        try:
            watch.start()
            time.sleep(0.25)
            worker.say(f"{case.variant} {case.seconds} none")
            launched = worker.wait("launched")
            survivor.wait("moving", timeout_s=3)
            time.sleep(max(0.0, launched["seen"] + case.kill_after_s - now()))
            killed = worker.kill()
            worker.reap()
            still = survivor.wait("still", "error", timeout_s=5)
            time.sleep(0.4)
            watch.close()
            end = float(still.get("last", now()))
            name = f"memory-{case.variant}-{int(case.kill_after_s * 10)}.gz"
            (out / name).write_bytes(gzip.compress(watch.snapshot(), 4))
            return {
                "case": case.name,
                "snapshot": name,
                "pid": worker.pid,
                "launched_ms": round((launched["t"] - end) * 1e3, 1),
                "killed_ms": round((killed - end) * 1e3, 1),
                "scans": watch.scans,
                "unreadable": watch.unreadable,
                "areas": [[hex(a), s, n] for a, s, n in watch.areas],
                "changes_ms_after_end": [[round((t - end) * 1e3, 1), n, w] for t, n, w in watch.changes],
            }
        finally:
            space.close()


def measure(out: Path, cubin: Path, uvm: NvidiaUvm, nvml: Nvml, rows: list[Any]) -> None:
    with domain("memory", out) as mps_domain:
        survivor = mps_domain.client("survivor", cubin, str(mps_domain.base / "share"))
        with clients(survivor):
            survivor.wait("ready")
            for case in CASES:
                try:
                    rows.append(run_case(mps_domain, survivor, cubin, uvm, case, out))
                except Exception as error:
                    rows.append({"case": case.name, "failed": f"{type(error).__name__}: {error}"})
