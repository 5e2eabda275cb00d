"""Builds nvidia-uvm and its stub, boots both without a GPU, and prints a line for each check.

python -m emulator --suite trixie            # the stock module
python -m emulator --suite trixie --patched  # with the patch
python -m emulator --suite trixie --gpu      # what a client's fault does, on the GPU in software
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from emulator import driver, image, kernel, stub, vm
from emulator.guest import catalogue
from kmod.debian import cache_folder
from kmod.errors import KmodError


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    sets = given.set or sets_for(patched=given.patched, gpu=given.gpu)
    try:
        with tempfile.TemporaryDirectory(prefix="mpsd-emulator-") as folder:
            return report(Path(folder), given, sets)
    except KmodError as error:
        print(f"emulator: {error}", file=sys.stderr)
        return 1


def sets_for(*, patched: bool, gpu: bool) -> list[str]:
    """One machine runs one set: each begins with a module that is not loaded."""
    if gpu:
        return list(catalogue.GPU_PATCHED) if patched else ["gpu-stock"]
    return ["patched" if patched else "stock"]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="emulator", description=__doc__, add_help=True)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--suite", default="trixie", help="whose driver source: bookworm, trixie, ...")
    made.add_argument("--patched", action="store_true", help="with the patch (default: the stock module)")
    made.add_argument("--gpu", action="store_true", help="on the GPU in software")
    made.add_argument("--set", action="append", choices=sorted(catalogue.SETS), help="only this")
    made.add_argument("--kernel", default="", help="release to boot (default: newest with headers here)")
    made.add_argument("--cache", type=Path, default=cache_folder())
    return made


def report(folder: Path, given: argparse.Namespace, sets: list[str]) -> int:
    """Run and print; 0 if every check passed."""
    options = {"patched": given.patched, "gpu": given.gpu, "release": given.kernel}
    machine = prepare(folder, given.cache, given.suite, **options)
    return max([boot(machine, name, folder / "console") for name in sets])


def boot(machine: vm.Machine, name: str, console: Path) -> int:
    """One set in a machine of its own; 0 if every check passed."""
    results = vm.run(machine, [name], catalogue.SETS[name], console)
    for result in results:
        word = "ok" if result.passed else "FAILED"
        print(f"{word:6} {result.name:24} {result.seconds:6.1f} s  {result.text}", flush=True)
    failed = [result for result in results if not result.passed]
    if failed:
        print(f"\nthe end of the guest's kernel log:\n{vm.tail(console)}")
    return 1 if failed else 0


def prepare(
    folder: Path, cache: Path, suite: str, *, patched: bool, gpu: bool = False, release: str = ""
) -> vm.Machine:
    """Everything built and packed into `folder`. Raises Unavailable, KmodError."""
    found = kernel.find(cache, release)
    built = driver.build(suite, found, cache, patched=patched)
    made = stub.build(built.module, built.tree, built.version, found, folder / "stub", gpu=gpu)
    image.write(folder / "initramfs", {"nvidia.ko": made.module, "nvidia-uvm.ko": built.module})
    return vm.Machine(found.image, folder / "initramfs")


if __name__ == "__main__":
    sys.exit(main())
