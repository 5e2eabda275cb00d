"""Live processes of the last revision, and a new daemon that replaces their daemon.

MPSD_TEST_OLD_REVISION_DIR names a checkout of revision 50d9fcb. Its daemon, keeper, simulated GPU, clients,
mpsd_client and proxy run here on the Python packages of this environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import site as site_module
from tests.support.libcudas import quick_compiler
from tests.support.site import DEADLINE_S, ROOT, Program, Site, until
from tests.support.upgradefixtures import DATA
from tests.support.upgradescene import NO_CLIENT, SETTINGS, Proxied, Scene, has_setting, said
from tests.support.waiting import BUILD_S

VARIABLE = "MPSD_TEST_OLD_REVISION_DIR"


class TwoRevisions(Site):
    """A site that runs the daemon of the other checkout until `upgrade`."""

    def __init__(self, old: Path, **settings: str) -> None:
        self.root = old
        super().__init__(**settings)

    def environ(self) -> dict[str, str]:
        # The checkout must stay as it is.
        quiet = {"PYTHONDONTWRITEBYTECODE": "1"}
        return {**super().environ(), **quiet, "PYTHONPATH": python_path(self.root)}

    def keeper(self) -> psutil.Process | None:
        """Return the keeper's process, of either revision."""
        return next(iter(self.processes("/keeper.py")), None)

    def upgrade(self) -> None:
        """Start the present daemon. Programs that join later still come from the checkout."""
        self.root = ROOT
        self.start()


def python_path(root: Path, *more: str) -> str:
    folders = (str(root), str(root / "clients"), *more, sysconfig.get_path("purelib"))
    return os.pathsep.join(folders)


@pytest.fixture
def old() -> Path:
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"{VARIABLE} does not name a checkout of revision 50d9fcb")
    return Path(named).resolve()


@pytest.fixture
def two(old: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoRevisions]:
    monkeypatch.setattr(site_module, "PROGRAM", str(old / "tests" / "support" / "simclient.py"))
    site = TwoRevisions(old, protect="", **SETTINGS)
    with site:
        yield site


@pytest.fixture
def new_site() -> Iterator[Site]:
    with Site(protect="", **SETTINGS) as site:
        yield site.start()


def tell_old(old: Path, site: Site, *arguments: str, deadline_s: float = DEADLINE_S, **extra: str) -> str:
    """Return what a Python command of the other checkout prints, as a client of this site."""
    environ = {**site.environ(), **extra, "PYTHONPATH": python_path(old, str(old / "clients" / "libcuda"))}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**environ, "MPSD_SOCKET": site.socket, "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    assert done.returncode in (0, 10), done.stderr
    return done.stdout


@pytest.mark.parametrize("how", ["kill -9", "SIGTERM", "kill -9 and a lost state file"])
def test_a_live_node_is_taken_over(two: TwoRevisions, how: str) -> None:
    scene = Scene(two.start()).play()
    worker = two.join("work")
    two.until(lambda s: {d["state"] for d in s["domains"]} == {"active", "warm"}, "two domains are left")
    before = {**scene.ask_all()}
    (keeper,) = two.processes(str(two.root / "mpsd" / "keeper.py"))
    if how == "SIGTERM":
        assert two.terminate() == 0
    else:
        two.kill()
    if "lost" in how:
        (two.run_dir / "state.json").unlink()
    two.upgrade()
    for name in ("faults", "failovers"):
        assert two.ask(lambda c, name=name: c.call(name)) == before[name]
    assert holdings(two.ask(lambda c: c.call("vault_list"))) == holdings(before["vault_list"])
    assert keeper.is_running()
    (dead,) = two.until(lambda s: s["dead"], "the exited client's lease is held")["dead"]
    assert dead["pid"] == scene.lingering.pid and dead["state"] == ("held" if "lost" in how else "lingering")
    assert two.node(op="work", pid=scene.lingering.pid)["busy"] == 1
    if "lost" not in how:
        check_status(two, scene, before["status"], worker)
    assert worker.finish()["rounds"] > 0
    assert two.join().do("dev.on_mps") == {"result": True}
    if "lost" not in how:
        fail_over(two, scene)


def holdings(answer: Any) -> list[dict[str, Any]]:
    changing = {"age_s", "died_s", "expires_s"}
    return [{k: v for k, v in row.items() if k not in changing} for row in answer["holdings"]]


def check_status(site: Site, scene: Scene, before: Any, worker: Program) -> None:
    """The new daemon finds everything that lives unchanged."""
    status = site.attached(scene.living, scene.zoned, worker)
    for part in ("id", "control_pid", "server_pid", "role", "state"):
        assert [d[part] for d in status["domains"]] == [d[part] for d in before["domains"]], part
    assert has_setting(status)
    row = next(c for c in status["clients"] if c["pid"] == scene.zoned.pid)
    assert (row["zone_policy"], row["zone_policy_set"]) == ("absorb", True)

    def guarded(shown: Any) -> bool:
        rows = [c for c in shown["clients"] if c["pid"] == scene.living.pid]
        return any(text.startswith("guard") for c in rows for text in c["protections"])

    site.until(guarded, "the guard is known")


def fail_over(site: Site, scene: Scene) -> None:
    """Participants of the last revision survive a fault under the new daemon."""
    for program in scene.participants:
        assert said(program, "fo.hello('keep', fo.generation)")[0] == "WELCOME"
        assert said(program, "fo.prepare()")[0] == "STANDBY"
    scene.until_ready(*scene.participants)
    site.join().fault()
    for program in scene.participants:
        assert said(program, "fo.move()")[0] == "MOVE"
    scene.until_outcomes(2, "moved")


def test_the_last_clients_of_python_talk_to_a_new_daemon(old: Path, new_site: Site) -> None:
    client = new_site.join()
    text = f"""
import mpsd_client, sys
assert mpsd_client.__file__.startswith({str(old)!r})
with mpsd_client.connect() as client:
    pids = [row["pid"] for row in client.status()["clients"]]
    assert pids == [{client.pid}], pids
    assert client.env() and client.domain and client.vault_socket and client.failover_socket
    assert [row["pid"] for row in client.holders()] == pids
    assert client.faults() == client.failovers() == client.vault_list() == []
    assert client.version()["version"] and client.explain("sm-trap") and client.doctor()
    try:
        client.kill({NO_CLIENT})
        sys.exit("a process that is no client was killed")
    except mpsd_client.MpsdError as error:
        assert error.code == "not-found", error.code
    stream = client.subscribe(since_id=0)
    kinds = [next(stream)["kind"] for _ in range(stream.kept)]
    assert "client-attached" in kinds, kinds
    assert client.kill(pids[0])["outcome"] == "evicted"
"""
    tell_old(old, new_site, "-c", text)
    assert client.wait() < 0


def test_the_last_mpsd_ctl_shows_a_new_daemon(old: Path, new_site: Site) -> None:
    client = new_site.join()
    client.fault()
    new_site.until_fault("mmu-invalid-address")
    assert str(client.pid) in tell_old(old, new_site, "-m", "mpsd.ctl", "faults")
    for command in ("status", "failovers", "doctor", "version", "env"):
        assert tell_old(old, new_site, "-m", "mpsd.ctl", command)
    assert "CUDA_MPS_PIPE_DIRECTORY" in tell_old(old, new_site, "-m", "mpsd_client.run", "--env")


@pytest.mark.timeout(BUILD_S + 100)
def test_the_last_proxy_fails_over_under_a_new_daemon(old: Path, tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc: the libcuda proxy cannot be built here")
    build = "import pathlib, sys, tests.support.libcudas as l; l.build_libraries(pathlib.Path(sys.argv[1]))"
    with Site(protect="", **SETTINGS) as site:
        tell_old(old, site, "-c", build, str(tmp_path), deadline_s=BUILD_S, CC=quick_compiler(tmp_path))
        site.write_config(failover__driver=f'"{tmp_path / "standin" / "libcuda.so.1"}"')
        site.start()
        with Proxied(site, old, tmp_path, DATA / "proxied.py") as program:
            record = program.fail_over()
            row = next(c for c in site.status()["clients"] if c["pid"] == program.pid)
            assert row["proxied"] and row["guard_zones"] is not None
            assert record["clients"][0]["outcome"] == "moved"
        until(
            lambda: not [r for r in site.ask(lambda c: c.vault_list()) if r["pid"] == program.pid], "all went"
        )
