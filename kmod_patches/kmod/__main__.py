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
    "The patch to nvidia-uvm. install builds the installed driver with the patch and prefers it to the stock "
    "modules. load loads it now. unload and uninstall restore the stock modules. The other verbs work on a "
    "driver source. See VERB --help."
)


def main() -> int:
    given = parsed(_parser())
    if isinstance(given, int):
        return given
    end_when_told()
    try:
        return finished(int(given.verb(given)))
    except KeyboardInterrupt:
        return _failed(given, KmodError("interrupted; run the same command again to continue"), 130)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        return _failed(given, KmodError("ended by a signal; run the same command again to continue"), status)
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
    verb = verbs.add_parser("fetch", help="copy the driver's source of a Debian suite to a new folder")
    suites = ", ".join(suite.name for suite in debian.SUITES)
    verb.add_argument("suite", help=f"tested: {suites}")
    verb.add_argument("tree", type=Path, help="the new folder, which must not exist")
    verb.add_argument("--cache", type=Path, help="folder of the cache ($XDG_CACHE_HOME/mpsd-kmod)")
    verb.set_defaults(verb=_fetch)
    for name, function, text in (
        ("status", _status, "show what is installed and loaded, or the patch's state in a driver source"),
        ("apply", _apply, "apply the patch to a driver source"),
        ("reverse", _reverse, "remove the patch from a driver source"),
        ("build", _build, "apply the patch and build nvidia.ko and nvidia-uvm.ko"),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.add_argument(
            "tree",
            type=Path,
            nargs="?" if name == "status" else None,
            help="the folder that contains nvidia-uvm, or the parent of kernel-open",
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
        raise KmodError(f"{given.tree} exists already; name a new folder")
    fetched = debian.fetch(given.suite, given.cache or debian.cache_folder())
    # A copy, because other runs compare with the cache's own.
    with making(given.tree.absolute(), "the driver's source") as made:
        os.rename(copy(find(fetched.tree), made / "tree", whole=True).root, given.tree)
    print(f"driver {find(given.tree).version} ({PACKAGE} {fetched.version}) in {given.tree}")
    return 0


def _patch(tree: Tree, given: argparse.Namespace) -> tuple[hooks.Patch, Kernel | None]:
    """Return the patch, with mends for a kernel if its headers are installed. A named kernel needs
    headers."""
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
            raise KmodError("--kernel applies only to a TREE; name one")
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
    print(f"driver {tree.version}: {'applied' if done else 'already applied'}")
    if not tree.tested:
        print(f"driver {tree.version} is not tested with this patch", file=sys.stderr)
    return 0


def _reverse(given: argparse.Namespace) -> int:
    tree = find(given.tree)
    done = hooks.reverse(tree)
    print(f"driver {tree.version}: {'restored' if done else 'had no patch'}")
    return 0


def _build(given: argparse.Namespace) -> int:
    tree, found = find(given.tree), kernel(given.kernel)
    log = given.tree / "mpsd-kmod-build.log"
    require_programs()
    with alone(tree.root, hooks.LOCK_DEADLINE_S):
        _apply_alone(tree, given)
        print(f"building for kernel {found.release}, which takes some minutes; log: {log}", flush=True)
        for module in build(tree, found, log, jobs=given.jobs, deadline_s=BUILD_DEADLINE_S):
            print(module)
    return 0


if __name__ == "__main__":
    sys.exit(main())
