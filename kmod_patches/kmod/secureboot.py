"""Whether this machine loads only signed modules, and whether the key that ours are signed with counts."""

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

# Where dkms keeps the key that it makes itself, and where Ubuntu's does.
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
    """A private key in PEM form and its certificate in DER form, as sign-file wants them."""

    private: Path
    certificate: Path


@dataclass(frozen=True, slots=True)
class SecureBoot:
    """`on`: None where the firmware does not say. `enforced`: the kernel refuses unsigned modules."""

    on: bool | None
    enforced: bool

    @property
    def signed_only(self) -> bool:
        return bool(self.on) or self.enforced

    def text(self) -> str:
        state = {True: "on", False: "off", None: "no EFI variable for it"}[self.on]
        return f"{state}; the kernel {'loads signed modules only' if self.enforced else 'does not insist'}"


def state(machine: Machine) -> SecureBoot:
    return SecureBoot(_variable(machine), _enforced(machine))


def _variable(machine: Machine) -> bool | None:
    """Four bytes of attributes, then one: 1 is on."""
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
    """The one that dkms signs with: as its settings say, or the one that it has made. None: none yet."""
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
    """Raises KmodError naming the one that cannot be read."""
    for path in (private, certificate):
        if not os.access(path, os.R_OK):
            raise KmodError(f"--sign: {path} cannot be read")
    return Key(private.resolve(), certificate.resolve())


def require_tool(machine: Machine, release: str) -> None:
    """Raises Unavailable where nothing can sign for this kernel, where our script looks."""
    headers = machine.modules / release / "build/scripts/sign-file"
    shared = machine.root / f"usr/lib/linux-kbuild-{release.rpartition('.')[0]}/scripts/sign-file"
    if not (os.access(headers, os.X_OK) or os.access(shared, os.X_OK) or shutil.which("kmodsign")):
        raise Unavailable(f"--sign: {headers} is missing, which comes with the kernel's headers")


def enrolled(certificate: Path) -> bool:
    """As mokutil sees it. Raises Unavailable without mokutil."""
    said = run_any(["mokutil", "--test-key", certificate], deadline_s=MOKUTIL_DEADLINE_S)
    return "is already enrolled" in said


def require(machine: Machine, given: Key | None) -> None:
    """Raises KmodError where a module built now would not load, with what to do about it."""
    found = state(machine)
    if not found.signed_only:
        return
    used = given or key(machine)
    what = "Secure Boot is on" if found.on else "this kernel loads signed modules only"
    if used is None:
        raise KmodError(
            f"{what} and dkms has no key to sign with yet; make one and enrol it, then install: "
            + remedy(Path("/var/lib/dkms/mok.pub"), MAKE_KEY + " && ")
        )
    try:
        known = enrolled(used.certificate)
    except Unavailable:
        raise KmodError(
            f"{what}, and without mokutil it cannot be seen whether {used.certificate} is enrolled: "
            "install mokutil"
        ) from None
    if not known:
        raise KmodError(
            f"{what} and {used.certificate} is not enrolled; enrol it: {remedy(used.certificate)}"
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
