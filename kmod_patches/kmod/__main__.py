"""mpsd-kmod install | uninstall | load | unload | users | status [TREE]

For a driver source: fetch SUITE TREE | apply TREE | reverse TREE | build TREE
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from kmod import debian, hooks, packaging
from kmod.alone import alone
from kmod.build import Kernel, build, kernel, mends
from kmod.caching import making
from kmod.command import at_least_one, end_when_told, finished, parsed
from kmod.debian import PACKAGE
from kmod.errors import KmodError, Unavailable, text_of
from kmod.install import require_programs
from kmod.tree import Tree, copy, find

BUILD_DEADLINE_S = 3600.0
DESCRIPTION = (
    "The patch to nvidia-uvm: install builds the driver that is on this machine with the patch in and puts "
    "it before the stock one, load loads it now, unload and uninstall go back. The others work on a driver "
    "source. VERB --help tells more."
)


def main() -> int:
    given = parsed(_parser())
    if isinstance(given, int):
        return given
    end_when_told()
    try:
        return finished(int(given.verb(given)))
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
    print(f"mpsd-kmod: {text_of(error)}", file=sys.stderr)
    return finished(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mpsd-kmod", description=DESCRIPTION)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    packaging.add_verbs(verbs)
    verb = verbs.add_parser(
        "fetch", help="copy the driver's source that a suite of Debian has to a new folder"
    )
    suites = ", ".join(suite.name for suite in debian.SUITES)
    verb.add_argument("suite", help=f"tested: {suites}")
    verb.add_argument("tree", type=Path, help="the folder, which must not be there")
    verb.add_argument("--cache", type=Path, help="what was fetched is kept there ($XDG_CACHE_HOME/mpsd-kmod)")
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
        if name != "reverse":
            verb.add_argument(
                "--kernel",
                default="",
                help="release (default: the running one, or the newest with headers)",
            )
        verb.set_defaults(verb=function)
        if name == "status":
            packaging.add_common(verb)
        if name == "build":
            verb.add_argument("--jobs", type=at_least_one, default=os.cpu_count() or 1)
    return parser


def _fetch(given: argparse.Namespace) -> int:
    if given.tree.exists():
        raise KmodError(f"{given.tree} is there already; name a new folder")
    fetched = debian.fetch(given.suite, given.cache or debian.cache_folder())
    # Not the cache's own, which is what others are measured by.
    with making(given.tree.absolute(), "the driver's source") as made:
        os.rename(copy(find(fetched.tree), made / "tree", whole=True).root, given.tree)
    print(f"driver {find(given.tree).version} ({PACKAGE} {fetched.version}) in {given.tree}")
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
        if given.kernel:
            raise KmodError("--kernel says for which kernel a TREE is looked at; name one")
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
    with alone(tree.root, hooks.LOCK_DEADLINE_S):
        return _apply_alone(tree, given)


def _apply_alone(tree: Tree, given: argparse.Namespace) -> int:
    patch, _ = _patch(tree, given)
    done = hooks.apply_alone(tree, patch)
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
    tree, found = find(given.tree), kernel(given.kernel)
    log = given.tree / "mpsd-kmod-build.log"
    require_programs()
    with alone(tree.root, hooks.LOCK_DEADLINE_S):
        _apply_alone(tree, given)
        print(f"building for kernel {found.release}, some minutes; {log}", flush=True)
        for module in build(tree, found, log, jobs=given.jobs, deadline_s=BUILD_DEADLINE_S):
            print(module)
    return 0


if __name__ == "__main__":
    sys.exit(main())
