"""A Debian kernel to boot: its headers are installed, its image is unpacked into a cache, never installed."""

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
    """`headers`: to build modules against; `sources`: what flavours share of that; `image`: what boots."""

    release: str
    headers: Path
    sources: Path
    image: Path

    def exports(self) -> frozenset[str]:
        """Every symbol that the kernel and its own modules export."""
        text = (self.headers / "Module.symvers").read_text(encoding="utf-8")
        return frozenset(line.split("\t")[1] for line in text.splitlines())


def find(cache: Path, release: str = "") -> Kernel:
    """The kernel of a release, or of the newest whose headers are here. Raises Unavailable, KmodError."""
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
        raise KmodError(f"the package of kernel {release} holds no image")
    headers, sources = LIB_MODULES / release / "build", LIB_MODULES / release / "source"
    return Kernel(release, headers, sources if sources.is_dir() else headers, image)


def newest() -> str:
    """The release of the newest kernel whose headers are here, "" without one."""
    return next(iter(_known()), "")


def _known() -> list[str]:
    return [name for name in releases() if (LIB_MODULES / name / "build/Module.symvers").is_file()]


def _version(release: str) -> str:
    """Of the installed headers: a release's name stays when Debian builds it anew."""
    query = ["dpkg-query", "-W", "-f", "${Version}", f"linux-headers-{release}"]
    return run(query, deadline_s=DOWNLOAD_DEADLINE_S)


def _unpack(release: str, version: str, target: Path) -> None:
    """The image in its package, from the machine's archive."""
    with making(target, f"the image of kernel {release}") as made:
        command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", f"linux-image-{release}={version}"]
        run(command, deadline_s=DOWNLOAD_DEADLINE_S, cwd=made)
        run(["dpkg-deb", "-x", next(made.glob("*.deb")), made / "package"], deadline_s=DOWNLOAD_DEADLINE_S)
        # Of some 400 MB one file is wanted.
        kept = made / "kept" / "boot"
        kept.mkdir(parents=True)
        os.rename(made / "package" / "boot" / f"vmlinuz-{release}", kept / f"vmlinuz-{release}")
        os.rename(kept.parent, target)
