"""Secure Boot: whether this machine loads only signed modules, and whether our signing key is accepted."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kmod.command import run_any
from kmod.errors import KmodError, Unavailable
from kmod.machine import Machine

VARIABLE = "firmware/efi/efivars/SecureBoot-*"
ENFORCED = "module/module/parameters/sig_enforce"
LOCKDOWN = "kernel/security/lockdown"
MOKUTIL_DEADLINE_S = 30.0

# Folders of the key that dkms creates itself, and of Ubuntu's.
KEYS = (
    ("var/lib/shim-signed/mok/MOK.priv", "var/lib/shim-signed/mok/MOK.der"),
    ("var/lib/dkms/mok.key", "var/lib/dkms/mok.pub"),
)
MAKE_KEY = (
    'openssl req -new -x509 -nodes -days 36500 -subj "/CN=DKMS module signing key" -newkey rsa:2048 '
    "-keyout /var/lib/dkms/mok.key -outform DER -out /var/lib/dkms/mok.pub"
)
SETTING = re.compile(r"^\s*(mok_signing_key|mok_certificate)=[\"']?([^\"'\s]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Key:
    """A private key in PEM form and its certificate in DER form, as sign-file needs them."""

    private: Path
    certificate: Path


@dataclass(frozen=True, slots=True)
class SecureBoot:
    """State of Secure Boot. `on`: None if unknown. `enforced`: the kernel refuses unsigned modules."""

    on: bool | None
    enforced: bool

    @property
    def signed_only(self) -> bool:
        return bool(self.on) or self.enforced

    def text(self) -> str:
        state = {True: "on", False: "off", None: "unknown (no EFI variable)"}[self.on]
        return f"{state}; the kernel {'loads only' if self.enforced else 'does not require'} signed modules"


def state(machine: Machine) -> SecureBoot:
    return SecureBoot(_variable(machine), _enforced(machine))


def _variable(machine: Machine) -> bool | None:
    """Read the EFI variable: four bytes of attributes, then one byte, 1 for on."""
    for path in sorted(machine.sys.glob(VARIABLE)):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        if len(data) >= 5:
            return data[4] == 1
    return None


def _enforced(machine: Machine) -> bool:
    def text(name: str) -> str:
        try:
            return (machine.sys / name).read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            return ""

    return (
        text(ENFORCED) in ("Y", "1") or "[integrity]" in text(LOCKDOWN) or "[confidential" in text(LOCKDOWN)
    )


def key(machine: Machine) -> Key | None:
    """Return the key with which dkms signs: from its settings, or its own. None: there is none yet."""
    found: dict[str, str] = {}
    folder = machine.root / "etc/dkms"
    for path in [folder / "framework.conf", *sorted((folder / "framework.conf.d").glob("*.conf"))]:
        try:
            found.update(SETTING.findall(path.read_text(encoding="utf-8", errors="replace")))
        except OSError:
            continue
    if len(found) == 2:
        return Key(Path(found["mok_signing_key"]), Path(found["mok_certificate"]))
    for private, certificate in KEYS:
        if (machine.root / certificate).is_file():
            return Key(machine.root / private, machine.root / certificate)
    return None


def given_key(private: Path, certificate: Path) -> Key:
    """Return the given key. Raises KmodError with the name of an unreadable file."""
    for path in (private, certificate):
        if not os.access(path, os.R_OK):
            raise KmodError(f"--sign: cannot read {path}")
    return Key(private.resolve(), certificate.resolve())


def require_tool(machine: Machine, release: str) -> None:
    """Raise Unavailable if no signing tool for this kernel is where our script searches."""
    headers = machine.modules / release / "build/scripts/sign-file"
    shared = machine.root / f"usr/lib/linux-kbuild-{release.rpartition('.')[0]}/scripts/sign-file"
    if not (os.access(headers, os.X_OK) or os.access(shared, os.X_OK) or shutil.which("kmodsign")):
        raise Unavailable(f"--sign: {headers} is missing, which comes with the kernel's headers")


def enrolled(certificate: Path) -> bool:
    """Return mokutil's answer. Raises Unavailable without mokutil."""
    said = run_any(["mokutil", "--test-key", certificate], deadline_s=MOKUTIL_DEADLINE_S)
    return "is already enrolled" in said


def require(machine: Machine, given: Key | None) -> None:
    """Raise KmodError with a remedy if a module built now would not load."""
    found = state(machine)
    if not found.signed_only:
        return
    used = given or key(machine)
    what = "Secure Boot is on" if found.on else "this kernel loads signed modules only"
    if used is None:
        raise KmodError(
            f"{what}, but dkms has no signing key yet; create one and enrol it, then install: "
            + remedy(Path("/var/lib/dkms/mok.pub"), MAKE_KEY + " && ")
        )
    try:
        known = enrolled(used.certificate)
    except Unavailable:
        raise KmodError(
            f"{what}, but mokutil is missing, which tells whether {used.certificate} is enrolled: "
            "install mokutil"
        ) from None
    if not known:
        raise KmodError(
            f"{what}, but {used.certificate} is not enrolled; enrol it: {remedy(used.certificate)}"
        )


def remedy(certificate: Path, before: str = "") -> str:
    return (
        f"{before}mokutil --import {certificate}, choose a password, reboot, and choose Enroll MOK in "
        "the dialogue before the system starts"
    )


def as_json(machine: Machine) -> Mapping[str, object]:
    found, used = state(machine), key(machine)
    return {
        "secure_boot": found.on,
        "signatures_enforced": found.enforced,
        "certificate": str(used.certificate) if used else None,
    }
