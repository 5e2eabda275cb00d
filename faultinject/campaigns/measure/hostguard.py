"""Which classes of host address range can carry a guard without breaking healthy programs?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.nvml import Nvml
from faultinject.campaigns.measure.rig import (
    Client,
    Domain,
    attach,
    clients,
    domain,
    now,
)
from mpsd.base.errors import GpuError
from mpsd.gpu.nvidia.uvm import NvidiaUvm, UvmAddressSpace
from mpsd.gpu.nvidia.uvm_abi import SPARSE_GRANULE

Range = tuple[int, int]
LOW: Range = (0x10000, 8 << 30)


def mappings(pid: int) -> list[tuple[int, int, str, str]]:
    """Return (begin, end, permissions, name) of every mapping of a process."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        begin, end = (int(word, 16) for word in words[0].split("-"))
        found.append((begin, end, words[1], words[5] if len(words) > 5 else ""))
    return found


CLASSES: dict[str, Callable[[str], bool]] = {
    "heap": lambda name: name == "[heap]",
    "stack": lambda name: name == "[stack]",
    "library or program file": lambda name: name.startswith(
        ("/usr", "/opt", "/lib", "/nix", "/root", "/home")
    ),
    "temporary file": lambda name: name.startswith("/tmp"),
    "shm file": lambda name: name.startswith("/dev/shm"),
    "memfd": lambda name: name.startswith("/memfd"),
}


def ranges_of(pid: int, wanted: Callable[[str], bool]) -> list[Range]:
    """Return merged 64 KiB ranges around the mappings of a class."""
    merged: list[Range] = []
    for begin, end, _, name in mappings(pid):
        if not wanted(name):
            continue
        begin &= -SPARSE_GRANULE
        end = (end + SPARSE_GRANULE - 1) & -SPARSE_GRANULE
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def lay(space: UvmAddressSpace, ranges: Iterable[Range], uuid: str) -> dict[str, Any]:
    """Guard all ranges; return what was refused."""
    began = now()
    done: list[Range] = []
    refused: dict[str, int] = {}
    for begin, end in ranges:
        try:
            space.map_sparse(begin, end - begin, uuid)
            done.append((begin, end))
        except GpuError as error:
            text = f"{error.status:#x}"
            refused[text] = refused.get(text, 0) + 1
    mib = sum(end - begin for begin, end in done) >> 20
    return {"laid": len(done), "mib": mib, "refused": refused, "ms": round((now() - began) * 1e3, 2)}


def ask(client: Client, command: str) -> Any:
    client.forget()
    client.say(command)
    event = client.wait("answer", "failed", timeout_s=20)
    return event.get("answer", event)


def register_under_guards(mps_domain: Domain, cubin: Path, uvm: NvidiaUvm, uuid: str) -> list[Any]:
    """Measure host registration and every allocation without a guard, then under all classes of guard."""
    rows: list[Any] = []
    with clients(mps_domain.client("memory", cubin)) as (client,):
        ready = client.wait("ready")
        rows.append({"what": "where the pages lie", "places": ready["places"]})
        rows.append({"what": "registration, no guard", **ask(client, "register")})
        rows.append({"what": "allocation, no guard", **ask(client, "allocate")})
        low = [m for m in mappings(client.pid) if m[0] < 0x300000000]
        rows.append(
            {"what": "mappings below 12 GiB", "lines": [[hex(a), hex(b), p, n] for a, b, p, n in low]}
        )
        space = attach(uvm, client)
        try:
            for name, wanted in CLASSES.items():
                rows.append({"what": f"guard: {name}", **lay(space, ranges_of(client.pid, wanted), uuid)})
            rows.append({"what": "registration, all mapped classes guarded", **ask(client, "register")})
            rows.append({"what": "allocation, all mapped classes guarded", **ask(client, "allocate")})
        finally:
            space.close()
    return rows


def low_hole(mps_domain: Domain, cubin: Path, uvm: NvidiaUvm, uuid: str) -> list[Any]:
    """Guard [64 KiB, 8 GiB) around the mappings there."""
    rows: list[Any] = []
    with clients(mps_domain.client("memory", cubin)) as (client,):
        client.wait("ready")
        space = attach(uvm, client)
        try:
            inside = [m[:2] for m in mappings(client.pid) if m[0] < LOW[1]]
            rows.append(
                {"what": "guard: whole low range", "mapped inside": len(inside), **lay(space, [LOW], uuid)}
            )
            rows.append({"what": "registration, low range guarded", **ask(client, "register")})
            rows.append({"what": "allocation, low range guarded", **ask(client, "allocate")})
            rows.append({"what": "managed 64 MiB", **ask(client, "managed 64")})
        finally:
            space.close()
    return rows


def stale(mps_domain: Domain, cubin: Path, uvm: NvidiaUvm, uuid: str) -> list[Any]:
    """Unmap a guarded file mapping: which calls fail in its hole, before and after the guard is removed?"""
    rows: list[Any] = []
    calls = ("reserve", "register", "managed", "alloc", "pinned")
    for call in calls:
        with clients(mps_domain.client("memory", cubin)) as (client,):
            client.wait("ready")
            space = attach(uvm, client)
            try:
                mapped = ask(client, "map-file 1024")
                begin = int(mapped["at"], 16) & -SPARSE_GRANULE
                end = int(mapped["at"], 16) + mapped["size"] & -SPARSE_GRANULE
                guard = lay(space, [(begin, end)], uuid)
                ask(client, "unmap-file")
                row = {
                    "what": f"stale guard, then {call}",
                    "guard": guard,
                    "while_stale": ask(client, f"land {call}"),
                }
                began = now()
                try:
                    space.unmap_sparse(begin, end - begin)
                    row["removal"] = f"{(now() - began) * 1e3:.2f} ms"
                except GpuError as error:
                    row["removal"] = str(error)
                row["after_removal"] = ask(client, f"land {call}")
                rows.append(row)
            finally:
                space.close()
    return rows


def library(mps_domain: Domain, cubin: Path, uvm: NvidiaUvm, uuid: str) -> list[Any]:
    """dlclose a guarded library, then allocate."""
    with clients(mps_domain.client("memory", cubin)) as (client,):
        client.wait("ready")
        before = {m[3] for m in mappings(client.pid)}
        ask(client, "dlopen")
        new = {m[3] for m in mappings(client.pid)} - before
        space = attach(uvm, client)
        try:
            ranges = ranges_of(client.pid, lambda name: name in new and name.startswith("/"))
            guard = lay(space, ranges, uuid)
            closed = ask(client, "dlclose")
            row = {
                "what": "dlclose under a guard",
                "library": sorted(new)[:3],
                "guard": guard,
                "closed": closed,
            }
            row["allocation"] = ask(client, "allocate")
            began, freed = now(), 0
            for begin, end in ranges:
                try:
                    space.unmap_sparse(begin, end - begin)
                    freed += 1
                except GpuError as error:
                    row["removal refused"] = str(error)
            row |= {"removed": freed, "removal_ms": round((now() - began) * 1e3, 2)}
            return [row]
        finally:
            space.close()


def measure(out: Path, cubin: Path, uvm: NvidiaUvm, nvml: Nvml, rows: list[Any]) -> None:
    with (
        domain("guard", out, start_server=True) as mps_domain,
        clients(mps_domain.client("survivor", cubin)) as (neighbour,),
    ):
        neighbour.wait("ready")
        for part in (register_under_guards, low_hole, stale, library):
            try:
                rows += part(mps_domain, cubin, uvm, nvml.uuid)
            except Exception as error:
                rows.append({"what": part.__name__, "failed": f"{type(error).__name__}: {error}"})
        neighbour.say("report")
        rows.append({"what": "neighbour", **neighbour.wait("alive", "error", timeout_s=5)})
