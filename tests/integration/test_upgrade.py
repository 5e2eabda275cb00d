"""A daemon takes over what revision 50d9fcb left: files, stored descriptors, its keeper, its clients.

The fixtures are from a real run of that revision (tests/data/upgrade). test_upgrade_live.py does the same
with the live processes of that revision, where a checkout of it is given.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

import mpsd_client
from mpsd.base.model import GuardClass
from mpsd.clients import lease
from mpsd.clients.guardnotes import GuardNotes
from mpsd.fdstore import fdset
from mpsd.vault.notes import VaultNotes
from mpsd_client.vault import Vault
from tests.support.site import DEADLINE_S, Site, until
from tests.support.upgradefixtures import (
    KEEPER,
    content,
    file_of,
    guard_ranges,
    journal,
    labels,
    names,
    rows,
    state,
    stored,
    upgraded,
    vault_notes,
)
from tests.support.upgradenames import PREFIX
from tests.support.upgradescene import SETTINGS, TOKEN, Scene, collect, has_setting, said

REPLACED_KEYS = [
    *("failover.enabled", "vault.enabled"),
    *("guard.follow_interval_s", "journal.evidence_window_s", "lease.probe_interval_ms"),
]
"""Keys that `protect` replaced, and that became constants. mpsd accepts them for one release more."""


@pytest.fixture(scope="module")
def taken_over() -> Iterator[Site]:
    with upgraded() as site:
        yield site


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(protect="", **SETTINGS) as started:
        yield started.start()


# -- files and stored sets ----------------------------------------------------------------------------------


def test_state_of_dead_domains_is_taken_over_without_a_complaint(taken_over: Site) -> None:
    status = taken_over.status()
    left = {path.name for path in (*taken_over.run_dir.iterdir(), *taken_over.state_dir.iterdir())}
    assert not [name for name in left if name.endswith((".damaged", ".newer", ".new"))]
    assert not status["counters"].get("internal_errors") and not status["counters"].get("effects_failed")
    bad = ("damaged", "newer", "not supervised", "cannot")
    assert not [text for text in status["problems"] if any(word in text for word in bad)]
    assert has_setting(status)
    assert not status["draining"]


def test_the_slot_keeps_its_path_and_a_new_domain_has_a_new_name(taken_over: Site) -> None:
    """Programs keep the path in their environment, so it must not change."""
    environ, domain = taken_over.ask(lambda c: (c.env(), c.domain))
    assert int(domain.removeprefix("d")) >= state()["next_domain"]
    (slot,) = state()["slots"]
    name = slot["id"].replace("-u0", f"-u{os.getuid()}")
    assert environ["CUDA_MPS_PIPE_DIRECTORY"] == str(taken_over.run_dir / "s" / name)
    assert [row["id"] for row in taken_over.status()["slots"]] == [name]


@pytest.mark.parametrize(
    ("command", "file"), [("faults", "faults.journal"), ("failovers", "failovers.journal")]
)
def test_records_are_the_same(taken_over: Site, command: str, file: str) -> None:
    recorded = journal(file)
    known = [r for r in taken_over.ask(lambda c: c.call(command))[command] if r["id"] <= len(recorded)]
    assert known == recorded
    shown = subprocess.run(
        [sys.executable, "-m", "mpsd.ctl", command],
        env={**taken_over.environ(), "MPSD_SOCKET": taken_over.socket, "NO_COLOR": "1", "COLUMNS": "4000"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    ).stdout
    for record in recorded:
        assert f"#{record['id']}" in shown
        parties = [record["offender"]] if command == "faults" else record["clients"]
        assert all(str(party["pid"]) in shown for party in parties)
        for key in ("summary", "address"):
            assert record.get(key) is None or " ".join(record[key].split()) in " ".join(shown.split())


def test_new_records_and_events_have_new_numbers(taken_over: Site) -> None:
    reserved = rows("events.json")[1]["reserved"]

    def read(client: mpsd_client.Client) -> tuple[str, int]:
        stream = client.subscribe(since_id=reserved - 1)
        return stream.gap, int(next(stream)["seq"])

    taken_over.client_environ()
    gap, first = taken_over.ask(read)
    assert gap == "earlier" and first > reserved
    scene = Scene(taken_over)
    participants = [scene.participant() for _ in range(2)]
    scene.until_ready(*participants)
    offender = taken_over.join()
    offender.fault()
    for program in participants:
        said(program, "fo.move()")
    scene.until_outcomes(1 + journal("failovers.journal")[-1]["id"], "moved")
    newest = taken_over.faults()[-1]
    assert newest["offender"]["pid"] == offender.pid
    assert newest["id"] == 1 + journal("faults.journal")[-1]["id"]
    for program in (*participants, offender):
        program.close()


def test_kept_memory_is_listed_claimed_and_freed(taken_over: Site) -> None:
    recorded = vault_notes(content(stored()["vault.notes"][0]))
    shown = taken_over.ask(lambda c: c.vault_list())
    for key in ("id", "pid", "start_ticks", "bytes", "gpu", "name", "alone"):
        assert [row[key] for row in shown] == [row[key] for row in recorded], key
    assert [int(row["address"], 16) for row in shown] == [row["address"] for row in recorded]
    assert all(row["by_token"] and row["stored"] and row["died_s"] is not None for row in shown)
    with Vault(str(taken_over.run_dir / "vault.sock"), TOKEN) as vault:
        piece = vault.take("weights", 3)
        assert piece is not None
        assert os.pread(piece.descriptor, 16, 0) == b"seven".ljust(16, b"\0")
        os.close(piece.descriptor)
        assert vault.release("weights")
    assert taken_over.ask(lambda c: c.vault_free("moments"))["freed"] == [recorded[1]["id"]]
    until(lambda: not any(name.startswith("vault") for name in labels(taken_over.run_dir)), "nothing is kept")


def test_leases_of_dead_domains_are_released(taken_over: Site) -> None:
    known = {label for label in (row["label"] for row in rows("store.jsonl")) if label.startswith("lease.")}
    until(lambda: not known & labels(taken_over.run_dir), "no lease of a dead domain is stored")
    assert not {row["pid"] for row in taken_over.status()["dead"]} & {
        int(label.split(".")[2]) for label in known
    }


def test_the_recorded_keeper_serves_the_new_daemon() -> None:
    """The keeper of that revision preserves only descriptors across daemons."""
    with upgraded() as site:
        client = site.join()
        client.do("dev.launch('forever')")
        (keeper,) = site.processes(KEEPER.name)
        site.kill()
        client.die()
        assert site.node(op="work", pid=client.pid)["busy"] == 1
        site.start()
        site.until(lambda s: [d for d in s["dead"] if d["pid"] == client.pid], "its lease was kept")
        assert site.processes("keeper.py") == [keeper]
        assert {row["name"] for row in site.ask(lambda c: c.vault_list())} == {"weights", "moments"}


def test_guard_notes_are_understood() -> None:
    guards = [row for of in stored().values() for row in of if row.get("file") == "mpsd-guard"]
    assert len(guards) == 5
    for row in guards:
        notes = GuardNotes.adopt(file_of(row))
        kinds = tuple(GuardClass)
        found = {(r.base, r.length, kinds.index(r.kind)) for r in notes.ranges()}
        notes.close()
        assert found and found == guard_ranges(content(row))


def test_notes_of_the_vault_are_understood() -> None:
    (row,) = stored()["vault.notes"]
    fd = os.memfd_create("notes", os.MFD_CLOEXEC)
    os.pwrite(fd, content(row), 0)
    notes, found = VaultNotes.adopt(fd)
    notes.close()
    recorded = vault_notes(content(row))
    assert [row["name"] for row in recorded] == ["weights", "moments"]
    for row in recorded:
        holding = found.pop(row["id"])
        owner, process = holding.owner, holding.process
        assert (process.pid, process.start_ticks) == (row["pid"], row["start_ticks"])
        assert (owner.uid, owner.cgroup, owner.token) == (row["uid"], row["cgroup"], row["token"])
        assert (holding.number, holding.size, holding.address) == (
            row["number"],
            row["bytes"],
            row["address"],
        )
        assert (holding.gpu, holding.name, holding.alone) == (row["gpu"], row["name"], row["alone"])
        assert (holding.since, holding.died) == (row["since"], row["died"])
    assert not found


def test_names_of_stored_sets_are_understood() -> None:
    held = {row["label"]: [os.open(os.devnull, os.O_RDONLY)] for row in rows("store.jsonl")}
    whole, incomplete = fdset.whole_sets(held)
    fdset.close_all(whole)
    assert not incomplete and whole.keys() == stored().keys()
    leases = [name for name in whole if name.startswith("lease.")]
    assert len(leases) == 5
    for name in leases:
        parsed = lease.stored_lease(name, len(whole[name]))
        assert parsed is not None and lease.is_current(name)
        client, roles = parsed
        assert (roles, client.domain) == (("va", "mm", "guard"), "d2")
        assert lease.lease_name(client, roles) == name


# -- names --------------------------------------------------------------------------------------------------


def test_no_name_that_others_rely_on_has_gone(site: Site) -> None:
    """Keys of answers and records, metrics, configuration, operations. See also test_upgrade_names.py."""
    found = collect(Scene(site).play())
    found["configuration"] += REPLACED_KEYS
    gone = {
        part: missing
        for part, wanted in names().items()
        if not part.startswith(PREFIX) and (missing := sorted(set(wanted) - set(found.get(part, ()))))
    }
    assert not gone
