"""The recorded files of revision 50d9fcb (tests/data/upgrade), and a run directory made of them.

Layouts are written out here, so that a change of the daemon's own readers and writers cannot hide itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.support.site import DEADLINE_S, ROOT, Site, until
from tests.support.upgradescene import SETTINGS, fetch
from tests.support.wirereplay import memory

DATA = ROOT / "tests" / "data" / "upgrade"
KEEPER = DATA / "keeper.py.txt"
VAULT_NOTE, VAULT_SLOT = struct.Struct("<QIQIQQQdd48s64s64s255s16sB"), 512
VAULT_FIELDS = ("id", "pid", "start_ticks", "uid", "number", "bytes", "address", "since", "died", "gpu")
GUARD_NOTE, GUARD_KINDS = struct.Struct("<QQQQ"), 4


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def names() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads((DATA / "names.json").read_text())
    return found


def journal(name: str) -> list[dict[str, Any]]:
    """Return the newest revision of every record of a journal, oldest first."""
    found: dict[int, dict[str, Any]] = {}
    for line in (DATA / name).read_bytes().splitlines()[1:]:
        checksum, length, body = line.split(b" ", 2)
        assert (int(checksum, 16), int(length)) == (zlib.crc32(body), len(body))
        record = json.loads(body)
        found[record["id"]] = record
    return [found[number] for number in sorted(found)]


def state() -> dict[str, Any]:
    head, body = (DATA / "state.json").read_bytes().splitlines()
    assert json.loads(head)["crc32"] == zlib.crc32(body)
    found: dict[str, Any] = json.loads(body)
    return found


def stored() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the keeper's labels, by set and in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows("store.jsonl"):
        name, _, place = row["label"].partition("#")
        found.setdefault(name, []).append(row)
        assert place == f"{len(found[name]) - 1}/{place.partition('/')[2]}"
    return found


def content(row: Mapping[str, Any]) -> bytes:
    return bytes.fromhex(row["content"]).ljust(row["bytes"], b"\0")


def vault_notes(data: bytes) -> list[dict[str, Any]]:
    """Return the holdings that the vault's notes name."""
    found = []
    for at in range(0, len(data), VAULT_SLOT):
        *values, token, name, cgroup, share, alone = VAULT_NOTE.unpack_from(data, at)
        row = dict(zip(VAULT_FIELDS, values, strict=True))
        texts = {"gpu": row["gpu"], "token": token, "name": name, "cgroup": cgroup}
        row |= {key: text.rstrip(b"\0").decode() for key, text in texts.items()}
        if row["id"]:
            found.append({**row, "share": share.hex(), "alone": bool(alone)})
    return found


def recent(data: bytes) -> bytes:
    """Return the vault's notes as if this user's clients had exited just now, by this boot's clock."""
    made = bytearray(data)
    for at in range(0, len(data), VAULT_SLOT):
        values = list(VAULT_NOTE.unpack_from(data, at))
        if values[0]:
            values[3], values[7:9] = os.getuid(), [time.monotonic(), time.monotonic()]
            VAULT_NOTE.pack_into(made, at, *values)
    return bytes(made)


def guard_ranges(data: bytes) -> set[tuple[int, int, int]]:
    """Return (base, length, number of the class) of every range in a lease's guard notes."""
    found = (GUARD_NOTE.unpack_from(data, at) for at in range(0, len(data), GUARD_NOTE.size))
    return {(base, length, kind) for base, length, kind, _ in found if length}


def file_of(row: Mapping[str, Any], *, as_recorded: bool = False) -> int:
    """Return a descriptor in the place of a stored one; a GPU's own is a socket with a closed other end.

    The vault's notes are those of `recent`, unless `as_recorded`.
    """
    if "file" not in row:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.close()
        return ours.detach()
    data = content(row)
    if row["file"] == "mpsd-vault-notes" and not as_recorded:
        data = recent(data)
    if row["file"] == "mpsd-standin-vmm":
        fd = memory(len(data))
    else:
        fd = os.memfd_create(row["file"], os.MFD_CLOEXEC)
    os.pwrite(fd, data, 0)
    return fd


class Datagrams:
    """The keeper's protocol of revision 50d9fcb, from the daemon's side."""

    def __init__(self, run_dir: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(DEADLINE_S)
        self._socket.connect(str(run_dir / "keeper.sock"))

    def send(self, text: str, *fds: int) -> None:
        socket.send_fds(self._socket, [text.encode()], list(fds))

    def barrier(self) -> str:
        """Return the keeper's refusals since the last barrier, or "ok"."""
        reading, writing = os.pipe()
        try:
            self.send("BARRIER=1", writing)
        finally:
            os.close(writing)
        with os.fdopen(reading) as pipe:
            return pipe.read()

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Datagrams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_keeper(run_dir: Path) -> None:
    """Start the keeper of revision 50d9fcb, from its own bytes. Returns once its socket listens."""
    command = [sys.executable, "-I", "-S", str(KEEPER), str(run_dir), "4096", "60", "10"]
    subprocess.run(command, env={}, check=True, timeout=DEADLINE_S)


def end_keeper(site: Site) -> None:
    """End the recorded keeper of a site, and its descriptors with it."""
    for process in site.processes(KEEPER.name):
        with Datagrams(site.run_dir) as keeper:
            keeper.send("EXIT=1")
        with contextlib.suppress(psutil.NoSuchProcess):
            process.wait(DEADLINE_S)


def labels(run_dir: Path) -> set[str]:
    """Return the descriptors in the keeper of this directory."""
    held = fetch(run_dir)
    for fd in held.values():
        os.close(fd)
    return set(held)


def fill_keeper(run_dir: Path) -> None:
    with Datagrams(run_dir) as keeper:
        for row in rows("store.jsonl"):
            fd = file_of(row)
            keeper.send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={row['label']}", fd)
            os.close(fd)
        assert keeper.barrier() == "ok"


def write_files(site: Site) -> None:
    """Write the run directory and the state directory as the last revision left them, for this user."""
    for folder in (site.run_dir, site.state_dir, site.log_dir):
        folder.mkdir()
    for domain in range(1, 4):
        (site.log_dir / f"d{domain}").mkdir()
    for name in ("faults.journal", "failovers.journal", "events.json"):
        shutil.copyfile(DATA / name, site.state_dir / name)
    head, body = (DATA / "state.json").read_text().splitlines()
    if os.getuid():
        body = body.replace('"uid":0', f'"uid":{os.getuid()}').replace('-u0"', f'-u{os.getuid()}"')
        body = body.replace('"settings":{"0"', f'"settings":{{"{os.getuid()}"')
        head = json.dumps({**json.loads(head), "crc32": zlib.crc32(body.encode())})
    (site.run_dir / "state.json").write_text(f"{head}\n{body}\n")


@contextlib.contextmanager
def upgraded() -> Iterator[Site]:
    """A new daemon started on the files of the last revision, with the keeper of that revision."""
    with Site(protect="", **SETTINGS) as site:
        write_files(site)
        start_keeper(site.run_dir)
        try:
            fill_keeper(site.run_dir)
            yield site.start()
        finally:
            if site.process is not None:
                site.terminate()
            end_keeper(site)
            until(lambda: not site.processes(KEEPER.name), "the recorded keeper has ended")
