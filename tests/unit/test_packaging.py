"""The wheels, and the unit file: systemd accepts it, and it says what mpsd relies on."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from mpsd.config.schema import Config, default_directories
from mpsd.failover.driverfiles import candidates

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "scripts" / "packaging" / "systemd"
NEWER_KEYS = "FileDescriptorStorePreserve"
"""Keys that an older systemd ignores, which is intended."""


def unit() -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(FOLDER / "mpsd.service")
    return dict(parser["Service"])


def test_what_mpsd_relies_on() -> None:
    service = unit()
    assert service["Type"] == "notify"
    assert service["KillMode"] == "process"
    assert service["RuntimeDirectoryPreserve"] == "yes"
    assert int(service["FileDescriptorStoreMax"]) >= Config().store.max_descriptors
    assert float(service["WatchdogSec"]) > 0
    assert "PrivateTmp" not in service
    assert "PrivateDevices" not in service


def test_the_units_directories_are_the_defaults() -> None:
    service = unit()
    assert default_directories(0, {}) == {
        "run_dir": f"/run/{service['RuntimeDirectory']}",
        "log_dir": f"/var/log/{service['LogsDirectory']}",
        "state_dir": f"/var/lib/{service['StateDirectory']}",
    }


def test_the_copies_of_the_driver_are_open_to_users_and_the_journal_is_not() -> None:
    service = unit()
    places = [path.parent for path in candidates("", Path(f"/run/{service['RuntimeDirectory']}"), 0, {})]
    assert Path(f"/var/cache/{service['CacheDirectory']}") in places
    assert (service["CacheDirectoryMode"], service["StateDirectoryMode"]) == ("0755", "0750")


def test_every_command_is_linked() -> None:
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    links = [row for row in (FOLDER / "README.md").read_text().splitlines() if row.startswith("ln -sf")]
    assert {Path(word).name for link in links for word in link.split()[2:-1]} == set(commands)


def built(source: Path, target: Path) -> set[str]:
    """Return the files of the wheel of a source tree, built by its own build backend."""
    code = f"from hatchling.build import build_wheel; print(build_wheel({str(target)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(target / done.stdout.split()[-1]) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_of_the_daemon_carries_what_the_daemon_imports(tmp_path: Path) -> None:
    files = built(ROOT, tmp_path)
    assert {name.split("/")[0] for name in files} == {"mpsd", "mpsd_client"}
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "mpsd" / "docs").glob("*.md")}
    drivers = {str(path.relative_to(ROOT)) for path in (ROOT / "mpsd" / "gpu" / "drivers").glob("*.toml")}
    assert drivers and pages | drivers <= files


def test_the_harness_is_a_wheel_of_its_own(tmp_path: Path) -> None:
    files = built(ROOT / "faultinject", tmp_path)
    assert {name.split("/")[0] for name in files} == {"faultinject"}
    sources = (ROOT / "faultinject").rglob("*.py")
    assert {str(path.relative_to(ROOT)) for path in sources} <= files
    assert {"faultinject/campaigns.toml", "faultinject/programs/devices/bind.c"} <= files


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_analyze_verify(tmp_path: Path) -> None:
    text = (FOLDER / "mpsd.service").read_text()
    # mpsd is not installed where the unit expects it; everything else is verified unchanged.
    text = re.sub(r"^ExecStart=\S+", f"ExecStart={shutil.which('true')}", text, flags=re.MULTILINE)
    path = tmp_path / "mpsd.service"
    path.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if NEWER_KEYS not in line]
    # Only messages about this unit count: the machine's own units may be odd.
    assert not [line for line in said if "mpsd.service" in line]
    assert done.returncode == 0 or said, done.stderr


def test_the_group_is_made() -> None:
    assert f"g {Config().group} -" in (FOLDER / "mpsd.sysusers.conf").read_text()


def test_the_wheel_has_the_pages(tmp_path: Path) -> None:
    root = FOLDER.parents[2]
    code = f"from hatchling.build import build_wheel; print(build_wheel({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]) as wheel:
        packed = {name for name in wheel.namelist() if name.startswith("mpsd/docs/") and name.endswith(".md")}
    assert packed == {f"mpsd/docs/{path.name}" for path in (root / "mpsd" / "docs").glob("*.md")}
