"""The shape of the code, read from its source: which way imports run, sizes, types.

    errors, model, text, limits  <-  wire, core, config, linux  <-  adapters  <-  assembly (daemon)
    clients see wire and model; nothing imports faultinject or tests

A module that no group below claims is assembly: it may import everything, and nothing else imports it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "mpsd": ROOT / "mpsd",
    "mpsd_client": ROOT / "clients" / "mpsd_client",
    "faultinject": ROOT / "faultinject",
    "kmod": ROOT / "kmod_patches" / "kmod",
    "emulator": ROOT / "kmod_patches" / "emulator",
}
MAX_LINES = 600
REASON_FROM = 400
MAX_FUNCTION = 100
LONG_FUNCTION = 50

# Group: its modules (a name claims what is below it too), and the groups it may import besides itself.
GROUPS: dict[str, tuple[set[str], set[str]]] = {
    "base": ({"mpsd.errors", "mpsd.model", "mpsd.text", "mpsd.limits", "mpsd.output", "mpsd"}, set()),
    "wire": ({"mpsd.wire"}, set()),
    "core": ({"mpsd.core"}, {"base"}),
    "gpu base": ({"mpsd.gpu", "mpsd.gpu.base"}, {"base"}),
    "linux": ({"mpsd.linux"}, {"base"}),
    "config": ({"mpsd.config", "mpsd.config_reader"}, {"base"}),
    "logs": ({"mpsd.logs"}, {"base"}),
    "nvidia": ({"mpsd.gpu.nvidia"}, {"base", "gpu base", "linux"}),
    "simulated": ({"mpsd.gpu.simulated"}, {"base", "gpu base", "linux"}),
    "keeper": ({"mpsd.keeper"}, set()),
    "descriptor store": (
        {"mpsd.notify", "mpsd.keeperstore", "mpsd.fdset", "mpsd.fdstore"},
        {"base", "linux", "keeper"},
    ),
    "files": ({"mpsd.journal", "mpsd.statefile", "mpsd.eventnumbers"}, {"base", "linux"}),
    "control": (
        {
            "mpsd.control",
            "mpsd.controlcommands",
            "mpsd.controltext",
            "mpsd.pipedir",
            "mpsd.mpslog",
            "mpsd.logfollow",
        },
        {"base", "linux"},
    ),
    "procs": ({"mpsd.procs"}, {"base", "linux"}),
    "layout": ({"mpsd.layout"}, {"base", "linux", "config"}),
    "config's verbs": ({"mpsd.config_cli"}, {"base", "config", "layout"}),
    "settings": ({"mpsd.settings"}, {"base", "config"}),
    "looks": ({"mpsd.looks", "mpsd.sweeps", "mpsd.turns"}, {"base"}),
    "notes": ({"mpsd.slotnotes"}, set()),
    "guard": (
        {"mpsd.guard", "mpsd.guardnotes", "mpsd.guardplan"},
        {"base", "core", "gpu base", "linux", "looks", "notes"},
    ),
    "zones": (
        {"mpsd.zones", "mpsd.trackers"},
        {"base", "core", "gpu base", "linux", "looks", "procs"},
    ),
    "listener": ({"mpsd.listener"}, {"base", "wire", "linux"}),
    "client": ({"mpsd_client"}, {"wire", "base"}),
    "kernel patch": ({"kmod"}, set()),
    # What runs in the virtual machine are the daemon's own adapters.
    "emulator": ({"emulator"}, {"kernel patch", "base", "nvidia"}),
    "doctor": ({"mpsd.doctor"}, {"base", "gpu base", "linux", "control", "procs", "config", "layout"}),
    # Explaining a fault and looking at the machine must work where no daemon does.
    "ctl": (
        {"mpsd.ctl"},
        {"base", "wire", "client", "logs", "core", "linux", "config", "doctor", "nvidia"},
    ),
}
FORBIDDEN_IN_CORE = {
    "os",
    "time",
    "socket",
    "subprocess",
    "asyncio",
    "threading",
    "logging",
    "select",
    "random",
}


def sources() -> Iterator[tuple[str, Path]]:
    """(module name, file) of all code but the tests."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts))
            yield name.removesuffix(".__init__"), path


def imports(module: str, path: Path) -> Iterator[str]:
    """Full names of what a file imports, inside functions and under TYPE_CHECKING too."""
    names = {name for name, _ in sources()}
    here = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*here[: len(here) - node.level + 1], *([node.module] if node.module else [])])
            source = base if node.level else str(node.module)
            for alias in node.names:
                full = f"{source}.{alias.name}"
                yield full if full in names else source


def group_of(module: str) -> str:
    """The group with the longest name that claims the module."""
    best, found = "", "assembly"
    for group, (members, _) in GROUPS.items():
        for member in members:
            claims = module == member or (member != "mpsd" and module.startswith(member + "."))
            if claims and len(member) > len(best):
                best, found = member, group
    return found


def ours(name: str) -> bool:
    return name.split(".")[0] in {*PACKAGES, "tests"}


def test_imports_run_one_way() -> None:
    wrong = []
    for module, path in sources():
        group = group_of(module)
        for target in imports(module, path):
            top = target.split(".")[0]
            if top in ("faultinject", "tests") and module.split(".")[0] != top:
                wrong.append(f"{module} imports {target}")
            elif ours(target) and group != "assembly":
                allowed = {group, *GROUPS[group][1]}
                if group_of(target) not in allowed:
                    wrong.append(f"{module} ({group}) imports {target} ({group_of(target)})")
    assert not wrong, "\n".join(wrong)


def test_core_touches_nothing_of_the_world() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, path in sources()
        if group_of(module) == "core"
        for target in imports(module, path)
        if target.split(".")[0] in FORBIDDEN_IN_CORE
    ]
    assert not wrong, "\n".join(wrong)


def test_wire_and_keeper_need_the_standard_library_alone() -> None:
    wrong = []
    for module, path in sources():
        if group_of(module) not in ("wire", "keeper"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            named = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            wrong += [
                f"{module}: {name}"
                for name in named
                if str(name).split(".")[0] not in sys.stdlib_module_names
            ]
    assert not wrong, "wire imports itself relatively and nothing else: " + ", ".join(wrong)


@pytest.mark.parametrize("root", ["mpsd", "clients", "faultinject", "tests", "kmod_patches"])
def test_files_are_short(root: str) -> None:
    wrong = []
    for path in sorted((ROOT / root).rglob("*.py")):
        text = path.read_text()
        lines = text.count("\n")
        head = ast.get_docstring(ast.parse(text)) or ""
        if lines > MAX_LINES:
            wrong.append(f"{path.relative_to(ROOT)} has {lines} lines, at most {MAX_LINES} are allowed")
        elif lines > REASON_FROM and "long because" not in head.lower():
            wrong.append(
                f"{path.relative_to(ROOT)} has {lines} lines; its docstring gives no `Long because ...`"
            )
    assert not wrong, "\n".join(wrong)


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for module, path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{module}.{node.name}", node


def test_functions_have_return_types_and_are_short() -> None:
    sizes = {}
    untyped = []
    for name, node in functions():
        sizes[name] = (node.end_lineno or node.lineno) - node.lineno + 1
        if node.returns is None:
            untyped.append(name)
    assert not untyped, f"no return type: {untyped}"
    huge = {name: size for name, size in sizes.items() if size > MAX_FUNCTION}
    assert not huge
    long = [name for name, size in sizes.items() if size > LONG_FUNCTION]
    assert len(long) <= len(sizes) // 50, (
        f"more than 2 % of the functions are over {LONG_FUNCTION} lines: {long}"
    )


def test_no_module_is_a_drawer_for_everything() -> None:
    names = {"utils", "util", "helpers", "helper", "misc", "common"}
    assert not [module for module, _ in sources() if module.split(".")[-1] in names]
