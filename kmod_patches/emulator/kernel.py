"""A Debian kernel to boot: its headers are installed, its image is unpacked into a cache, never installed."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kmod.command import run
from kmod.errors import KmodError, Unavailable

MODULES = Path("/lib/modules")
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


def releases(modules: Path = MODULES) -> list[str]:
    """Kernels whose headers are installed, newest name last."""
    return sorted(path.parent.name for path in modules.glob("*/build") if (path / "Module.symvers").is_file())


def find(cache: Path, release: str = "") -> Kernel:
    """The kernel of a release, or of the newest whose headers are here. Raises Unavailable, KmodError."""
    known = releases()
    release = release or (known[-1] if known else "")
    if release not in known:
        raise Unavailable(
            f"no kernel headers{f' of {release}' if release else ''} are installed below {MODULES}"
        )
    image = cache / "kernels" / release / "boot" / f"vmlinuz-{release}"
    if not image.is_file():
        _unpack(release, image.parents[1])
    if not image.is_file():
        raise KmodError(f"the package of kernel {release} holds no image")
    headers, sources = MODULES / release / "build", MODULES / release / "source"
    return Kernel(release, headers, sources if sources.is_dir() else headers, image)


def _unpack(release: str, target: Path) -> None:
    """The image in its package, at the version of the installed headers, from the machine's archive."""
    version = run(
        ["dpkg-query", "-W", "-f", "${Version}", f"linux-headers-{release}"], deadline_s=DOWNLOAD_DEADLINE_S
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".unpack-", dir=target.parent))
    try:
        command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", f"linux-image-{release}={version}"]
        run(command, deadline_s=DOWNLOAD_DEADLINE_S, cwd=made)
        run(["dpkg-deb", "-x", next(made.glob("*.deb")), made / "package"], deadline_s=DOWNLOAD_DEADLINE_S)
        # Of some 400 MB one file is wanted; whole under its name, or not at all.
        kept = made / "kept" / "boot"
        kept.mkdir(parents=True)
        os.rename(made / "package" / "boot" / f"vmlinuz-{release}", kept / f"vmlinuz-{release}")
        os.rename(kept.parent, target)
    except OSError as error:
        if not target.is_dir():
            raise KmodError(f"the image of kernel {release} could not be unpacked: {error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
