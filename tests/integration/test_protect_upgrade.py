"""mpsd-ctl protect between this revision and the one before it, in which neither proxy nor daemon knows it.

The other revision comes from git. Its packages and its proxy run on the Python packages of this environment.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mpsd.base.errors import MpsdError
from mpsd.ctl.__main__ import main
from tests.integration.test_protect import BY_HAND
from tests.integration.test_upgrade_live import TwoRevisions, tell_old
from tests.support.libcudas import quick_compiler, session_libraries
from tests.support.site import DEADLINE_S, ROOT, Site
from tests.support.upgradefixtures import DATA
from tests.support.upgradescene import SETTINGS, Proxied
from tests.support.waiting import BUILD_S

REVISION = "1af2b46337fb76d4043fe8106244b668ce94ec07"
BUILD = "import pathlib, sys, tests.support.libcudas as l; l.build_libraries(pathlib.Path(sys.argv[1]))"

pytestmark = pytest.mark.timeout(2 * BUILD_S + 200)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the revision before."""
    if shutil.which("gcc") is None or shutil.which("git") is None:
        pytest.skip("gcc and git are needed to build the proxy of the revision before")
    command = ["git", "-C", str(ROOT), "archive", REVISION]
    done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        pytest.skip(f"no checkout with revision {REVISION[:8]}, which does not know mpsd-ctl protect")
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def present(before: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the proxy and the stand-in driver of this revision."""
    return session_libraries(tmp_path_factory).proxy.parent


@pytest.fixture
def two(before: Path, present: Path) -> Iterator[TwoRevisions]:
    driver = present / "standin" / "libcuda.so.1"
    with TwoRevisions(before, protect="", **SETTINGS | {"failover__driver": f'"{driver}"'}) as site:
        yield site


def is_ready(site: Site, program: Proxied) -> None:
    def ready(status: Mapping[str, Any]) -> list[Any]:
        rows = [p for slot in status["slots"] for p in slot["programs"]]
        return [p for p in rows if (p["pid"], p["standing"]) == (program.pid, "ready")]

    site.until(ready, "the proxied program is ready")


def protected(site: Site, program: Proxied) -> set[tuple[str, str]]:
    rows = [c["protected"] for c in site.status()["clients"] if c["pid"] == program.pid]
    return {(view["level"], view["why"]) for view in rows}


def computes(program: Proxied, address: str, value: int) -> None:
    assert program.do(f"write({address}, {value}) or sync()") == "0"


def test_the_proxy_before_is_told_nothing_and_goes_on_to_take_part(before: Path, tmp_path: Path) -> None:
    with Site(protect="", **SETTINGS) as site:
        tell_old(before, site, "-c", BUILD, str(tmp_path), deadline_s=BUILD_S, CC=quick_compiler(tmp_path))
        site.write_config(failover__driver=f'"{tmp_path / "standin" / "libcuda.so.1"}"')
        site.start()
        with Proxied(site, before, tmp_path, DATA / "proxied.py") as program:
            is_ready(site, program)
            with pytest.raises(MpsdError) as refused:
                site.ask(lambda c: c.protect(program.pid, "guard"))
            assert refused.value.code == "unsupported" and "earlier release" in refused.value.message
            assert protected(site, program) == {("failover", "")}
            assert program.fail_over()["clients"][0]["outcome"] == "moved"


def test_the_daemon_before_refuses_and_goes_on_to_move_the_program(
    two: TwoRevisions, present: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two.start()
    with Proxied(two, ROOT, present, DATA / "proxied.py") as program:
        is_ready(two, program)
        assert main(["--socket", two.socket, "protect", str(program.pid), "guard"]) == 2
        said = capsys.readouterr().err
        assert "the daemon is of an earlier release without this command" in said and "restart mpsd" in said
        assert program.fail_over()["clients"][0]["outcome"] == "moved"


def test_a_program_that_was_switched_off_stays_so_under_the_daemon_before(
    two: TwoRevisions, before: Path, present: Path
) -> None:
    two.root = ROOT
    two.start()
    with Proxied(two, ROOT, present, DATA / "proxied.py") as program:
        assert program.hear() == "[0, 0, 0, 0, 0]"
        address = program.do("alloc(1 << 20)")
        computes(program, address, 7)
        is_ready(two, program)
        two.ask(lambda c: c.protect(program.pid, "guard"))
        assert protected(two, program) == {("guard", BY_HAND)}
        computes(program, address, 8)
        two.kill()
        two.root = before
        two.start()
        two.until(lambda s: protected(two, program) == {("guard", BY_HAND)}, "it refuses the standby domain")
        computes(program, address, 9)
        two.kill()
        two.upgrade()
        two.until(lambda s: s["counters"].get("failover_switched_off"), "it says why it has left")
        # Its connection to the vault may come back later than this one.
        two.until(lambda s: protected(two, program) == {("guard", BY_HAND)}, "its zones are known again")
        computes(program, address, 10)
