"""Machines to boot, with and without the patch, and their expected results.

Some checks must fail for a stated reason and all others must pass: on the software GPU the stock module must
fail the checks that the patched module passes.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from emulator import driver, image, stub, vm
from emulator.driver import Driver
from emulator.guest import catalogue
from emulator.kernel import Kernel
from kmod import debian


@dataclass(frozen=True, slots=True)
class Boot:
    """A machine: its set of checks, its module, and the checks that must fail, with words of their reason."""

    checks: str
    patched: bool = False
    gpu: bool = False
    fails: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        module = "patched" if self.patched else "stock"
        return f"{self.checks}: {module} nvidia-uvm {'on the GPU in software' if self.gpu else 'on the stub'}"


RIG = Boot(
    "rig",
    fails={
        "wrong": "not what it has to be",
        "dead": "its process ended with -11",
        "silent": "no answer within",
        "behind-silent": "not reached",
    },
)
"""Without any module: the host must report failures inside the guest."""

BOOTS = (
    Boot("stock"),
    Boot("patched", patched=True),
    Boot("gpu-stock", gpu=True),
    Boot("isolated", gpu=True, fails={"stray-store-goes-on": "cancel-va", "stray-copy-goes-on": "reported"}),
    *(
        Boot(name, patched=True, gpu=True)
        for name in catalogue.SETS
        if name.startswith("gpu-") and name != "gpu-stock"
    ),
)
"""Boots of each driver. `isolated` decides: the patched module passes the same checks."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A check of a boot, and whether it ended as it must."""

    result: vm.Result
    right: bool
    text: str


def verdicts(boot: Boot, results: Sequence[vm.Result]) -> list[Verdict]:
    """Return one verdict per result, in order."""
    return [_verdict(boot.fails.get(result.name), result) for result in results]


def _verdict(must_say: str | None, result: vm.Result) -> Verdict:
    if must_say is None:
        return Verdict(result, result.passed, result.text)
    if result.passed:
        return Verdict(result, False, f"passed, but must fail: {result.text}")
    if must_say not in result.text:
        return Verdict(result, False, f"failed, but not with {must_say!r}: {result.text}")
    return Verdict(result, True, f"fails as it must: {result.text}")


@dataclass(frozen=True, slots=True)
class Shown:
    """Results of a boot: its title, each check, and the end of the kernel's log."""

    title: str
    found: Sequence[Verdict]
    log: str

    @property
    def right(self) -> bool:
        """Whether every check ended as it must."""
        return all(verdict.right for verdict in self.found)


@dataclass
class BootBench:
    """A place to boot one kernel with modules built in `folder`, which it owns; stubs are built once.

    Several threads may run one boot each; they build one after the other.
    """

    kernel: Kernel
    cache: Path
    folder: Path
    _stubs: dict[tuple[bool, Path, tuple[str, ...]], Path] = field(default_factory=dict)
    _building: threading.Lock = field(default_factory=threading.Lock)

    def run(self, boot: Boot, fetched: debian.Fetched | None) -> Shown:
        """Build what is missing and boot. Without a source: no modules. Raises Unavailable, KmodError."""
        place = f" (driver {fetched.version})" if fetched else ""
        with tempfile.TemporaryDirectory(dir=self.folder) as own:
            initramfs, console = Path(own) / "initramfs", Path(own) / "console"
            with self._building:
                image.write(initramfs, self.modules(boot, fetched) if fetched else {})
            machine = vm.Machine(self.kernel.image, initramfs)
            found = verdicts(boot, vm.run(machine, [boot.checks], catalogue.SETS[boot.checks], console))
            return Shown(f"{boot.title}{place}", found, vm.log_tail(console))

    def modules(self, boot: Boot, fetched: debian.Fetched) -> dict[str, Path]:
        """Return the files to load, by their names in the guest."""
        built = driver.build(fetched, self.kernel, self.cache, patched=boot.patched)
        return {"nvidia.ko": self._stub(built, gpu=boot.gpu), "nvidia-uvm.ko": built.module}

    def _stub(self, built: Driver, *, gpu: bool) -> Path:
        imports = stub.imported(built.module, self.kernel.exports())
        key = (gpu, built.tree, imports)
        if key not in self._stubs:
            folder = self.folder / f"stub{len(self._stubs)}"
            made = stub.build(built.module, built.tree, built.version, self.kernel, folder, gpu=gpu)
            self._stubs[key] = made.module
        return self._stubs[key]


def lines(found: Sequence[Verdict]) -> Iterator[str]:
    """Yield a line for each check."""
    for verdict in found:
        word = "ok" if verdict.right else "FAILED"
        text = verdict.text.replace("\n", " / ")
        yield f"{word:6} {verdict.result.name:24} {verdict.result.seconds:6.1f} s  {text}"
