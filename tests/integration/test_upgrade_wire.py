"""Sockets and datagrams of revision 50d9fcb: the present code answers recorded bytes as that revision did.

The recordings are from real processes of that revision (tests/data/upgrade): its daemon and keeper, its
mpsd_client, and its proxy through one fail-over.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mpsd.failover import messages as failover_wire
from mpsd.fdstore import fdset
from mpsd.fdstore.keeperstore import KeeperStore
from mpsd.fdstore.notify import Channel
from mpsd.fdstore.store import SystemdStore
from mpsd.vault import messages as vault_wire
from tests.support.descriptors import open_descriptors
from tests.support.manager import Manager
from tests.support.site import DEADLINE_S, Site, until
from tests.support.upgradefixtures import Datagrams, content, file_of, labels, rows, start_keeper
from tests.support.upgradescene import SETTINGS, Scene, said
from tests.support.wirereplay import (
    VAULT_ANSWER,
    Packets,
    Stream,
    failover_fields,
    messages,
    vault_fields,
    with_generation,
)


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(protect="", **SETTINGS) as started:
        yield started.start()


# -- numbers on the wire ---------------------------------------------------------------------------------


def test_numbers_of_messages_are_the_same() -> None:
    """Some are not in the recordings: one fault rarely needs all of them."""
    kinds = "HELLO PUT DROP KEEP CLAIM RELEASE LEDGER SHARE OPEN PUT_NAMED TAKE LEAVE"
    assert {k.name: k.value for k in vault_wire.Kind} == numbered(kinds, 1)
    statuses = numbered("OK QUOTA UNKNOWN DENIED TWICE NAME", 0) | {"IN_USE": 16}
    assert {s.name: s.value for s in vault_wire.Status} == statuses
    program = "HELLO READY UNREADY OPAQUE OWN_ERROR MOVED STAYED DONE UNSURE SHORT GAVE LOOKED LEFT "
    program += "HOLDS COST LEAVES EXPOSED"
    daemon = "WELCOME STANDBY STAND_DOWN MOVE TURN FENCED GIVE ROOM LIMIT GUARD"
    wanted = numbered(program, 1) | numbered(daemon, 65)
    assert {k.name: k.value for k in failover_wire.Kind} == wanted
    assert [m.value for m in failover_wire.MODES] == ["off", "keep", "exact"]


def numbered(names: str, first: int) -> dict[str, int]:
    return {name: number for number, name in enumerate(names.split(), first)}


# -- the descriptor store of a service manager -----------------------------------------------------------


def test_sets_in_a_service_managers_store_are_found(tmp_path: Path) -> None:
    recorded = {row["label"]: row for row in rows("systemd.jsonl")}
    inherited = {label: [file_of(row, as_recorded=True)] for label, row in recorded.items()}
    inodes = {label: os.fstat(fd).st_ino for label, (fd,) in inherited.items()}
    wanted = {
        label.removesuffix("#set"): [inodes[file] for file in content(row).decode().split()]
        for label, row in recorded.items()
        if label.endswith("#set")
    }
    assert {"vault.notes", "vault.1", "vault.2"} < wanted.keys()
    with Manager(tmp_path) as manager:
        channel = Channel(manager.address)
        store = SystemdStore(channel, inherited, limit=512)
        found = store.fetch_all()
        assert {name: [os.fstat(fd).st_ino for fd in fds] for name, fds in found.items()} == wanted
        fdset.close_all(found)
        store.close()
        channel.close()


# -- the keeper's protocol ----------------------------------------------------------------------------------


class HeardKeeper:
    """A context: a keeper that carries out no message and records all of them."""

    def __init__(self, run_dir: Path) -> None:
        self.heard: list[dict[str, Any]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(run_dir / "keeper.sock"))
        self._thread = threading.Thread(target=self._serve)
        self._there: list[int] = []

    def _serve(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._socket, 4096, 8)
            if data == b"EXIT=1":
                return
            self.heard.append({"text": data.decode(), "descriptors": len(fds)})
            if data == b"BARRIER=1":
                os.write(fds[0], b"ok")
            elif data == b"FETCH=1":
                with socket.socket(fileno=os.dup(fds[0])) as peer:
                    peer.send(b"END=0")
            elif data == b"HELLO=1":
                self._there.append(fds.pop())
            for fd in fds:
                os.close(fd)

    def __enter__(self) -> HeardKeeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(DEADLINE_S)
        self._socket.close()
        for fd in self._there:
            os.close(fd)


def test_the_datagrams_to_a_keeper_are_the_same(tmp_path: Path) -> None:
    before = open_descriptors()
    recorded = rows("keeper.jsonl")
    removed = next(row["text"] for row in recorded if row["text"].startswith("FDSTOREREMOVE"))
    name = removed.partition("FDNAME=")[2].partition("#")[0]
    own = [row for row in recorded if f"FDNAME={name}#" in row["text"]]
    puts = [row for row in own if row["text"].startswith("FDSTORE=")]
    barrier = {"text": "BARRIER=1", "descriptors": 1}
    with HeardKeeper(tmp_path) as keeper:
        store = KeeperStore.open(tmp_path, start=False)
        assert store.fetch_all() == {}
        null = os.open(os.devnull, os.O_RDONLY)
        store.put(name, [null] * len(puts))
        store.remove(name)
        store.end()
        os.close(null)
    assert recorded[:3] == keeper.heard[:3]
    assert keeper.heard[3:] == [*puts, barrier, *own[len(puts) :]]
    assert open_descriptors() == before


def test_this_keeper_obeys_the_recorded_datagrams(tmp_path: Path) -> None:
    store = KeeperStore.open(tmp_path)
    wanted: set[str] = set()
    null = os.open(os.devnull, os.O_RDONLY)
    with Datagrams(tmp_path) as keeper:
        for row in rows("keeper.jsonl"):
            order, _, label = row["text"].partition("\n")
            if order.startswith("FDSTORE"):
                label = label.rpartition("FDNAME=")[2]
                wanted = wanted | {label} if order == "FDSTORE=1" else wanted - {label}
                keeper.send(row["text"], *[null] * row["descriptors"])
        assert keeper.barrier() == "ok"
    os.close(null)
    assert wanted == {row["label"] for row in rows("store.jsonl")} == labels(tmp_path)
    store.end()


def test_a_new_store_works_with_the_recorded_keeper(tmp_path: Path) -> None:
    run_dir = tmp_path
    start_keeper(run_dir)
    store = KeeperStore.open(run_dir, start=False)
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    store.put("lease.d1.7.8.0.va+mm+guard", fds)
    store.put("vault.1", fds[:1])
    store.remove("vault.1")
    assert labels(run_dir) == {f"lease.d1.7.8.0.va+mm+guard#{n}/3" for n in range(3)}
    found = store.fetch_all()
    fdset.close_all({**found, "own": fds})
    assert {name: len(held) for name, held in found.items()} == {"lease.d1.7.8.0.va+mm+guard": 3}
    store.end()
    with pytest.raises(OSError):
        labels(run_dir)


# -- clients ------------------------------------------------------------------------------------------------


def test_the_bytes_of_an_earlier_client_are_answered_alike(site: Site) -> None:
    site.client_environ()
    recorded = rows("client.jsonl")
    starts = [n for n, row in enumerate(recorded) if row.get("sent", "").startswith("ff000000")]
    assert len(starts) == 2
    for begin, end in zip(starts, [*starts[1:], len(recorded)], strict=True):
        replay_client(site, recorded[begin:end])


def replay_client(site: Site, recorded: list[dict[str, Any]]) -> None:
    sent = [row["sent"] for row in recorded if "sent" in row]
    heard = [row["heard"] for row in recorded if "heard" in row]
    stream = Stream(site.socket)
    stream.send(sent[0])
    assert stream.greeting().hex() == "".join(heard)[:128]
    stream.send(sent[1])
    assert stream.command().hex() in "".join(heard)[128:512]
    answers = messages(heard)
    for request in sent[2:]:
        stream.send(request)
        compare_answers(answers.pop(0), stream.message())
    for event in answers[:1]:
        compare_answers(event, stream.message())
    stream.close()


def compare_answers(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    # A client of that revision rejects an envelope with other fields.
    assert old.keys() == new.keys()
    for key in ("v", "type", "id", "code"):
        assert old.get(key) == new.get(key), (old, new)
    assert old.get("result", {}).keys() <= new.get("result", {}).keys()
    assert {"kind", "at"} <= new.get("event", {"kind": 0, "at": 0}).keys()


@pytest.mark.parametrize("file", ["vault.jsonl", "proxy-vault.jsonl"])
def test_the_bytes_of_earlier_programs_to_the_vault_are_answered_alike(site: Site, file: str) -> None:
    recorded = rows(file)
    heard = [row for row in recorded if "heard" in row]
    module = "__import__('tests.support.wirereplay', fromlist=['x'])"
    path = str(site.run_dir / "vault.sock")
    answers = said(site.join(), f"{module}.replay_vault({path!r}, {recorded!r})")
    assert len(answers) == len(heard)
    for row, (data, descriptors) in zip(heard, answers, strict=True):
        old, new = vault_fields(row["heard"]), vault_fields(data)
        for key in ("magic", "version", "kind", "sequence", "status", "number", "address", "name"):
            assert old[key] == new[key], (key, old, new)
        assert old["kind"] > VAULT_ANSWER and row.get("descriptors", 0) == descriptors
        for key in ("size", "index", "count"):
            assert bool(old[key]) == bool(new[key]), (key, old, new)


def test_the_bytes_of_an_earlier_proxy_lead_it_through_a_fail_over(site: Site) -> None:
    recorded = rows("proxy-failover.jsonl")
    kinds = [failover_fields(row.get("sent") or row["heard"])["kind"] for row in recorded]
    ready, moved, welcome, standby, move, fenced = 2, 6, 65, 66, 68, 70
    assert {1, ready, moved, welcome, standby, move, fenced} <= set(kinds)
    neighbour = site.join()
    program = site.join()
    home = next(c["domain"] for c in site.status()["clients"] if c["pid"] == program.pid)
    opened = "f := __import__('tests.support.wirereplay', fromlist=['x']).Packets"
    assert program.do(f"[({opened}({str(site.run_dir / 'failover.sock')!r})), None][1]") == {"result": None}
    generation = 0
    for row, kind in zip(recorded, kinds, strict=True):
        if "sent" in row:
            recorded_one = failover_fields(row["sent"])["generation"]
            data = with_generation(row["sent"], generation) if recorded_one else row["sent"]
            assert program.do(f"f.send({data!r})") == {"result": None}
            continue
        if kind == move:
            Scene(site).until_ready(program)
            neighbour.fault()
        old, new = failover_fields(row["heard"]), failover_fields(said(program, "f.receive()[0]"))
        while new["kind"] != kind and new["kind"] == standby:
            new = failover_fields(said(program, "f.receive()[0]"))
        for key in ("magic", "version", "kind", "reserved"):
            assert old[key] == new[key], (key, old, new)
        if kind == welcome:
            # An earlier proxy reads whether the third value, what it may say in LOOKED, is 0.
            old["values"] = [*old["values"][:2], 2, *old["values"][3:]]
            assert (old["mode"], old["values"]) == (new["mode"], list(new["values"]))
        if kind == standby:
            generation = new["generation"]
            assert new["path"] == str(site.run_dir / "d" / f"d{generation}")
        if kind == move:
            reset_channels(site, home)

    def outcome() -> list[str]:
        records = site.ask(lambda c: c.failovers())
        return [c["outcome"] for r in records for c in r["clients"] if c["pid"] == program.pid]

    until(lambda: outcome() == ["moved"], "the fail-over is recorded")


def reset_channels(site: Site, domain: str) -> None:
    """Log the reset of a faulted domain's channels, and wait until mpsd has passed it on.

    Of the simulated GPU's own faults this line may be the first sign, which is no fence. After MOVED none is
    due either, so the line has to be read before that.
    """
    server = next(d["server_pid"] for d in site.status()["domains"] if d["id"] == domain)
    site.node(op="inject", fault="xid", number=43, pid=server, name="nvidia-cuda-mps")
    site.until(lambda s: s["counters"].get("failover_fences") == 1, "mpsd has sent FENCED")


def test_a_connection_of_an_earlier_version_is_refused_by_its_end(site: Site) -> None:
    """That revision's proxy knows no other refusal than the end of its connection."""
    packets = Packets(str(site.run_dir / "failover.sock"))
    hello = rows("proxy-failover.jsonl")[0]["sent"]
    packets.send(hello[:8] + "ff00" + hello[12:])
    assert packets.receive() == ("", [])
    packets.close()
