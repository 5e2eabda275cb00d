"""mpsd-kmod install | uninstall | load | unload | users | status [TREE]

For a driver source: fetch SUITE | apply TREE | reverse TREE | build TREE
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from kmod import debian, hooks, packaging
from kmod.build import Kernel, build, kernel, mends
from kmod.command import end_when_told
from kmod.errors import KmodError, Unavailable
from kmod.tree import Tree, find

BUILD_DEADLINE_S = 3600.0
DESCRIPTION = (
    "The patch to nvidia-uvm: install builds the driver that is on this machine with the patch in and puts "
    "it before the stock one, load loads it now, unload and uninstall go back. The others work on a driver "
    "source. VERB --help tells more."
)


def main() -> int:
    given = _parser().parse_args()
    end_when_told()
    try:
        return int(given.verb(given))
    except KeyboardInterrupt:
        return _failed(given, KmodError("broken off; the same command goes on with it"), 130)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        return _failed(given, KmodError("ended by a signal; the same command goes on with it"), status)
    except (KmodError, OSError) as error:
        return _failed(given, error, 1)


def _failed(given: argparse.Namespace, error: Exception, status: int) -> int:
    if getattr(given, "json", False):
        packaging.tell(packaging.refusal_json(error))
    print(f"mpsd-kmod: {error}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mpsd-kmod", description=DESCRIPTION)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    packaging.add_verbs(verbs)
    verb = verbs.add_parser(
        "fetch", help="get the driver's source that a suite of Debian has; prints its folder"
    )
    verb.add_argument("suite")
    verb.add_argument("--cache", type=Path, default=debian.cache_folder())
    verb.set_defaults(verb=_fetch)
    for name, function, text in (
        ("status", _status, "say what is installed and loaded, or how a driver source stands to the patch"),
        ("apply", _apply, "put the patch into a driver source"),
        ("reverse", _reverse, "take it out again"),
        ("build", _build, "put it in and build nvidia.ko and nvidia-uvm.ko"),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.add_argument(
            "tree",
            type=Path,
            nargs="?" if name == "status" else None,
            help="the folder with nvidia-uvm in it, or the one above kernel-open",
        )
        verb.add_argument("--kernel", default="", help="release to build for (default: the running one)")
        verb.set_defaults(verb=function)
        if name == "status":
            packaging.add_common(verb)
        if name == "build":
            verb.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser


def _fetch(given: argparse.Namespace) -> int:
    fetched = debian.fetch(given.suite, given.cache)
    print(fetched.tree)
    return 0


def _patch(tree: Tree, given: argparse.Namespace) -> tuple[hooks.Patch, Kernel | None]:
    """With the mends for a kernel, where one's headers are to be had; one that is named must be."""
    try:
        found = kernel(given.kernel)
    except Unavailable:
        if given.kernel:
            raise
        return hooks.whole_patch(), None
    return hooks.whole_patch(mends(tree, found)), found


def _status(given: argparse.Namespace) -> int:
    if given.tree is None:
        return packaging.machine_status(given)
    tree = find(given.tree)
    patch, _ = _patch(tree, given)
    kept = hooks.state(tree, patch)
    if given.json:
        value = {
            "folder": str(tree.root),
            "version": tree.version,
            "tested": tree.tested,
            "patch": kept.value,
        }
        print(json.dumps(value))
        return 0
    print(f"driver {tree.version}{'' if tree.tested else ' (not tested)'}: {kept.value}")
    return 0


def _apply(given: argparse.Namespace) -> int:
    tree = find(given.tree)
    patch, _ = _patch(tree, given)
    done = hooks.apply(tree, patch)
    print(f"driver {tree.version}: {'applied' if done else 'was applied already'}")
    if not tree.tested:
        print(f"driver {tree.version} is not one that the patch was tested with", file=sys.stderr)
    return 0


def _reverse(given: argparse.Namespace) -> int:
    tree = find(given.tree)
    done = hooks.reverse(tree)
    print(f"driver {tree.version}: {'put back as it was' if done else 'had no patch'}")
    return 0


def _build(given: argparse.Namespace) -> int:
    _apply(given)
    log = given.tree / "mpsd-kmod-build.log"
    tree, found = find(given.tree), kernel(given.kernel)
    for module in build(tree, found, log, jobs=given.jobs, deadline_s=BUILD_DEADLINE_S):
        print(module)
    return 0


if __name__ == "__main__":
    sys.exit(main())
