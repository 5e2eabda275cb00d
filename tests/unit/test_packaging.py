"""The unit file is what systemd understands, and says what mpsd relies on."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from mpsd.config import Config, default_directories

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "packaging" / "systemd"
NEWER_KEYS = "FileDescriptorStorePreserve"
"""Keys that an older systemd ignores, which is meant."""


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


def test_every_command_is_linked() -> None:
    commands = tomllib.loads((FOLDER.parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    link = next(row for row in (FOLDER / "README.md").read_text().splitlines() if row.startswith("ln -sf"))
    assert {Path(word).name for word in link.split()[2:-1]} == set(commands)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_analyze_verify(tmp_path: Path) -> None:
    text = (FOLDER / "mpsd.service").read_text()
    # mpsd is not installed where the unit will find it; everything else is verified as it is.
    text = re.sub(r"^ExecStart=\S+", f"ExecStart={shutil.which('true')}", text, flags=re.MULTILINE)
    path = tmp_path / "mpsd.service"
    path.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if NEWER_KEYS not in line]
    # Only what is said about this unit counts: the machine's own units may be odd.
    assert not [line for line in said if "mpsd.service" in line]
    assert done.returncode == 0 or said, done.stderr


def test_the_group_is_made() -> None:
    assert f"g {Config().group} -" in (FOLDER / "mpsd.sysusers.conf").read_text()
