"""Where only signed modules load, install asks for an enrolled key before it builds anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from kmod.errors import KmodError
from kmod.machine import Machine
from kmod.secureboot import Key, SecureBoot, as_json, given_key, key, require, state
from tests.kmod.machines import make_machine

MOKUTIL = "#!/bin/sh\n[ $1 = --test-key ] || exit 9\necho $2 is {said}\nexit {status}\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return make_machine(tmp_path / "root")


def firmware(machine: Machine, last: bytes) -> None:
    folder = machine.sys / "firmware/efi/efivars"
    folder.mkdir(parents=True)
    (folder / "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c").write_bytes(b"\x06\0\0\0" + last)


def mokutil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, status: int) -> None:
    (tmp_path / "mokutil").write_text(MOKUTIL.format(said=said, status=status))
    (tmp_path / "mokutil").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def dkms_key(machine: Machine) -> Key:
    made = Key(machine.dkms_tree / "mok.key", machine.dkms_tree / "mok.pub")
    made.private.write_text("private")
    made.certificate.write_text("public")
    return made


@pytest.mark.parametrize(("last", "on"), [(b"\x01", True), (b"\0", False), (b"", None)])
def test_the_firmware_says_whether_it_is_on(machine: Machine, last: bytes, on: bool | None) -> None:
    firmware(machine, last)
    assert state(machine) == SecureBoot(on, False)
    assert state(machine).signed_only is bool(on)


def test_a_machine_without_firmware_variables_asks_for_nothing(machine: Machine) -> None:
    assert state(machine) == SecureBoot(None, False)
    require(machine, None)


@pytest.mark.parametrize(
    ("name", "text", "enforced"),
    [
        ("module/module/parameters/sig_enforce", "Y\n", True),
        ("module/module/parameters/sig_enforce", "N\n", False),
        ("kernel/security/lockdown", "none [integrity] confidentiality\n", True),
        ("kernel/security/lockdown", "[none] integrity confidentiality\n", False),
    ],
)
def test_the_kernel_may_insist_by_itself(machine: Machine, name: str, text: str, enforced: bool) -> None:
    (machine.sys / name).parent.mkdir(parents=True, exist_ok=True)
    (machine.sys / name).write_text(text)
    assert state(machine).enforced is enforced


def test_without_a_key_it_is_said_how_to_make_one(machine: Machine) -> None:
    firmware(machine, b"\x01")
    with pytest.raises(
        KmodError, match=r"Secure Boot is on, but dkms has no signing key.*openssl req.*mokutil --import"
    ):
        require(machine, None)


def test_a_key_that_is_not_enrolled_is_refused(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    firmware(machine, b"\x01")
    certificate = dkms_key(machine).certificate
    mokutil(tmp_path, monkeypatch, "not enrolled", 0)
    with pytest.raises(
        KmodError, match=f"{certificate} is not enrolled; enrol it: mokutil --import {certificate}"
    ):
        require(machine, None)


def test_an_enrolled_key_is_enough(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    firmware(machine, b"\x01")
    dkms_key(machine)
    mokutil(tmp_path, monkeypatch, "already enrolled", 1)
    require(machine, None)
    assert as_json(machine)["secure_boot"] is True


def test_without_mokutil_it_is_not_guessed(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    firmware(machine, b"\x01")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KmodError, match="install mokutil"):
        require(machine, dkms_key(machine))


def test_the_settings_of_dkms_say_which_key_it_signs_with(machine: Machine) -> None:
    made = dkms_key(machine)
    assert key(machine) == made
    folder = machine.root / "etc/dkms"
    folder.mkdir(parents=True)
    (folder / "framework.conf").write_text(
        "# mok_signing_key=/no\nmok_signing_key=/a/key\nmok_certificate='/a/pub'\n"
    )
    assert key(machine) == Key(Path("/a/key"), Path("/a/pub"))


def test_a_key_that_was_named_must_be_readable(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("")
    with pytest.raises(KmodError, match=r"--sign: cannot read .*cert"):
        given_key(tmp_path / "key", tmp_path / "cert")
