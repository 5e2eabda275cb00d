"""The proxy and the stand-in under gcc's sanitizers: any report ends the program with an error."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.core.vault import Limits, Quota
from tests.support.libcudas import Libraries, build_libraries, run
from tests.support.site import until
from tests.support.vaulting import MemoryStore, RunningVault
from tests.support.zoning import GrantingVault

LIMITS = Limits(Quota(1 << 40, 512), Quota(1 << 40, 512), Quota(1 << 20, 16), 512, 3600.0)


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def sanitized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    return build_libraries(tmp_path_factory.mktemp("sanitized"), request.param)


@pytest.fixture
def vault_socket() -> Iterator[str]:
    """A vault's door; whatever the program brings is dropped with it."""
    store = MemoryStore()
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where:
        path = Path(where) / "vault.sock"
        with RunningVault(path, store, LIMITS) as running:
            yield str(path)
            until(lambda: running.look(lambda: not len(running.vault.ledger)), "nothing is held")
    store.empty()


def start() -> list[str]:
    """ThreadSanitizer of older compilers knows no address spaces as random as those of newer kernels."""
    fixed = ["setarch", "-R"]
    can = shutil.which("setarch") and run([*fixed, "true"], os.environ).returncode == 0
    return fixed if can else []


@pytest.mark.parametrize("vault", ["0", "1", "brought", "zones"])
@pytest.mark.parametrize("program, how", [("sequence", "dlsym"), ("threads", "getproc")])
def test_no_report(sanitized: Libraries, program: str, how: str, vault: str, vault_socket: str) -> None:
    chosen = {
        "brought": {"MPSD_VAULT_SOCKET": vault_socket},
        "zones": {"MPSD_VAULT": "1", "MPSD_ZONE_BUDGET": str(1 << 30), "MPSD_QUARANTINE_BYTES": str(8 << 20)},
    }.get(vault, {"MPSD_VAULT": vault})
    environment = sanitized.environment(proxied=True, **chosen)
    done = run([*start(), sanitized.program(program), how], environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] in ("ok", "cuCtxSynchronize 709")


def test_no_report_while_a_vault_grants_zones(sanitized: Libraries) -> None:
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where:
        path = Path(where) / "vault.sock"
        with GrantingVault(path, (1 << 30, 20)) as vault:
            environment = sanitized.environment(proxied=True, MPSD_VAULT_SOCKET=str(path))
            done = run([*start(), sanitized.program("threads"), "dlsym"], environment)
            assert (done.returncode, done.stderr) == (0, ""), done.stderr[-4000:]
            assert vault.asked.is_set()


@pytest.mark.parametrize("proxied", [False, True])
@pytest.mark.parametrize("program, how", [("ipc", "dlsym"), ("ipcthreads", "getproc")])
def test_no_report_of_two_processes(
    sanitized: Libraries, program: str, how: str, proxied: bool, vault_socket: str
) -> None:
    chosen = {"MPSD_VAULT_SOCKET": vault_socket} if proxied else {}
    environment = sanitized.environment(proxied=proxied, **chosen)
    done = run([*start(), sanitized.program(program), how], environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "ok"


@pytest.mark.parametrize("seed, zone", [(0, 0), (1, 0), (2, 1), (3, 1), (4, 3), (5, 10)])
def test_the_arena_agrees_with_a_model(sanitized: Libraries, seed: int, zone: int) -> None:
    program = sanitized.program("arena", sources=("arena.c",))
    done = run([program, str(seed), str(zone)], sanitized.environment(proxied=False))
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_no_report_of_several_copies(sanitized: Libraries, tmp_path: Path) -> None:
    for number in range(1, 7):
        shutil.copyfile(sanitized.real, tmp_path / f"copy-{number}.so")
    environment = sanitized.environment(proxied=False)
    done = run([*start(), sanitized.program("copies"), sanitized.real, tmp_path], environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", ""), done.stderr[-4000:]
