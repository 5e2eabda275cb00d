"""Build nvidia-uvm and its stub, boot both without a GPU, and print a line for each check.

python -m emulator --suite trixie            # the stock module
python -m emulator --suite trixie --patched  # with the patch
python -m emulator --suite trixie --gpu      # effects of a client's fault, on the software GPU
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from emulator import kernel
from emulator.boots import BOOTS, BootBench, Shown, lines
from emulator.guest import catalogue
from kmod import debian
from kmod.command import end_when_told
from kmod.errors import KmodError, text_of


def main(arguments: list[str] | None = None) -> int:
    end_when_told()
    given = parser().parse_args(arguments)
    wanted = [
        boot
        for boot in BOOTS
        if (boot.patched, boot.gpu) == (given.patched, given.gpu)
        and boot.checks in (given.set or [boot.checks])
    ]
    try:
        with tempfile.TemporaryDirectory(prefix="mpsd-emulator-") as folder:
            cache = given.cache or debian.cache_folder()
            bay = BootBench(kernel.find(cache, given.kernel), cache, Path(folder))
            fetched = debian.fetch(given.suite, cache)
            return 0 if all([report(bay.run(boot, fetched)) for boot in wanted]) else 1
    except (KmodError, OSError) as error:
        print(f"emulator: {text_of(error)}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="emulator", description=__doc__, add_help=True)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--suite", default="trixie", help="Debian suite of the driver source: bookworm, ...")
    made.add_argument("--patched", action="store_true", help="boot the patched module, not the stock module")
    made.add_argument("--gpu", action="store_true", help="boot with the software GPU")
    made.add_argument(
        "--set", action="append", choices=sorted(catalogue.SETS), help="run only this set of checks"
    )
    made.add_argument("--kernel", default="", help="release to boot (default: newest with headers here)")
    made.add_argument("--cache", type=Path, help="folder of the cache (default: $XDG_CACHE_HOME/mpsd-kmod)")
    return made


def report(shown: Shown) -> bool:
    """Print the results and return whether every check ended as it must."""
    print(f"== {shown.title}", flush=True)
    for line in lines(shown.found):
        print(line, flush=True)
    if not shown.right:
        print(f"\nthe end of the guest's kernel log:\n{shown.log}", flush=True)
    return shown.right


if __name__ == "__main__":
    sys.exit(main())
