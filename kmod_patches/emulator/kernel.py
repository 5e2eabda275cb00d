"""A Debian kernel to boot: its headers are installed; its image is unpacked into a cache, not installed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kmod.build import LIB_MODULES, releases
from kmod.caching import making
from kmod.command import run
from kmod.errors import KmodError, Unavailable

DOWNLOAD_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Kernel:
    """`headers`: for building modules; `sources`: the part that flavours share; `image`: to boot."""

    release: str
    headers: Path
    sources: Path
    image: Path

    def exports(self) -> frozenset[str]:
        """Return every symbol that the kernel and its own modules export."""
        text = (self.headers / "Module.symvers").read_text(encoding="utf-8")
        return frozenset(line.split("\t")[1] for line in text.splitlines())


def find(cache: Path, release: str = "") -> Kernel:
    """Return the kernel of a release, or the newest with headers here. Raises Unavailable, KmodError."""
    release = release or newest()
    if release not in _known():
        raise Unavailable(
            f"no kernel headers{f' of {release}' if release else ''} are installed below {LIB_MODULES}"
        )
    version = _version(release)
    image = cache / "kernels" / f"{release}_{version}" / "boot" / f"vmlinuz-{release}"
    if not image.is_file():
        _unpack(release, version, image.parents[1])
    if not image.is_file():
        raise KmodError(f"the package of kernel {release} contains no image")
    headers, sources = LIB_MODULES / release / "build", LIB_MODULES / release / "source"
    return Kernel(release, headers, sources if sources.is_dir() else headers, image)


def newest() -> str:
    """Return the release of the newest kernel with headers here, or ""."""
    return next(iter(_known()), "")


def _known() -> list[str]:
    return [name for name in releases() if (LIB_MODULES / name / "build/Module.symvers").is_file()]


def _version(release: str) -> str:
    """Return the version of the installed headers: a rebuilt kernel keeps its release."""
    query = ["dpkg-query", "-W", "-f", "${Version}", f"linux-headers-{release}"]
    return run(query, deadline_s=DOWNLOAD_DEADLINE_S)


def _unpack(release: str, version: str, target: Path) -> None:
    """Unpack the image from its package in the machine's archive."""
    with making(target, f"the image of kernel {release}") as made:
        command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", f"linux-image-{release}={version}"]
        run(command, deadline_s=DOWNLOAD_DEADLINE_S, cwd=made)
        run(["dpkg-deb", "-x", next(made.glob("*.deb")), made / "package"], deadline_s=DOWNLOAD_DEADLINE_S)
        # One file is needed of some 400 MB.
        kept = made / "kept" / "boot"
        kept.mkdir(parents=True)
        os.rename(made / "package" / "boot" / f"vmlinuz-{release}", kept / f"vmlinuz-{release}")
        os.rename(kept.parent, target)
