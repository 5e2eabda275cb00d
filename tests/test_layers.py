"""The structure of the code, read from its source: direction of imports, sizes, types.

A package of `mpsd` is a folder directly below it; `core`, `gpu.nvidia` and `gpu.simulated` include their
sub-packages. ALLOWED says what each package may import besides itself. `daemon` is the assembly: it may
import every package, and no package imports it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "mpsd": ROOT / "mpsd",
    "mpsd_client": ROOT / "clients" / "mpsd_client",
    "mpsd_libcuda": ROOT / "clients" / "libcuda" / "mpsd_libcuda",
    "libcuda_build": ROOT / "clients" / "libcuda" / "libcuda_build",
    "examples": ROOT / "clients" / "examples",
    "faultinject": ROOT / "faultinject",
    "kmod": ROOT / "kmod_patches" / "kmod",
    "emulator": ROOT / "kmod_patches" / "emulator",
}
# Code outside a package: build hooks.
LOOSE = {"clients/hatch_build.py", "clients/libcuda/hatch_build.py"}
# Modules that import by a name that is made at run time, and what they import that way.
DYNAMIC = {
    "mpsd_client": "its own modules",
    "faultinject.campaigns.measure.__main__": "its own modules",
    "faultinject.programs.paired": "faultinject.programs.workloads",
}
MAX_LINES = 600
MAX_MODULES = 15
MAX_FUNCTION = 100
LONG_FUNCTION = 50

# Modules allowed outside a package: the version, the entry point.
FLAT = {"mpsd", "mpsd.__main__", "faultinject", "faultinject.__main__"}
FREE = {"mpsd.daemon", "mpsd.__main__", "faultinject.__main__"}
"""May import everything: the assembly, and the entry points."""
ASSEMBLY = "mpsd.daemon"
ADAPTERS = {"mpsd.base", "mpsd.core", "mpsd.gpu", "mpsd.os"}
ALLOWED: Mapping[str, set[str]] = {
    "mpsd": set(),
    "mpsd.base": set(),
    "mpsd.wire": set(),
    "mpsd.docs": {"mpsd.base"},
    "mpsd.core": {"mpsd.base"},
    "mpsd.config": {"mpsd.base"},
    "mpsd.gpu": {"mpsd.base"},
    "mpsd.os": {"mpsd.base", "mpsd.core"},
    "mpsd.gpu.nvidia": {"mpsd.base", "mpsd.gpu", "mpsd.os"},
    "mpsd.gpu.simulated": {"mpsd", "mpsd.base", "mpsd.gpu", "mpsd.os"},
    "mpsd.fdstore": {"mpsd.base", "mpsd.os"},
    "mpsd.limits": {"mpsd.base", "mpsd.config", "mpsd.os"},
    "mpsd.mps": {"mpsd.base", "mpsd.config", "mpsd.core", "mpsd.limits", "mpsd.os"},
    "mpsd.zones": {"mpsd.base", "mpsd.os"},
    "mpsd.vault": {*ADAPTERS, "mpsd.fdstore"},
    "mpsd.failover": {"mpsd.base", "mpsd_client"},
    "mpsd.clients": {*ADAPTERS, "mpsd.fdstore", "mpsd.zones"},
    "mpsd.peers": {*ADAPTERS, "mpsd.config", "mpsd.failover", "mpsd.vault", "mpsd.wire", "mpsd.zones"},
    "mpsd.api": {
        "mpsd",
        *ADAPTERS,
        "mpsd.clients",
        "mpsd.config",
        "mpsd.limits",
        "mpsd.mps",
        "mpsd.peers",
        "mpsd.vault",
        "mpsd.wire",
    },
    "mpsd.records": {"mpsd.api", "mpsd.base", "mpsd.core", "mpsd.os", "mpsd.wire"},
    "mpsd.exporter": {"mpsd.base", "mpsd_client"},
    # Explaining a fault and checking the machine must work without a daemon.
    "mpsd.ctl": {
        "mpsd",
        "mpsd.api",
        "mpsd.base",
        "mpsd.config",
        "mpsd.core",
        "mpsd.docs",
        "mpsd.gpu.nvidia",
        "mpsd.wire",
        "mpsd_client",
    },
    "mpsd_client": {"mpsd.base", "mpsd.wire"},
    "mpsd_libcuda": set(),
    "libcuda_build": set(),
    "examples": {"mpsd_client"},
    "kmod": set(),
    # The checks in the virtual machine are the daemon's own adapters.
    "emulator": {"kmod", "mpsd.base", "mpsd.gpu.nvidia"},
    "faultinject": set(),
    "faultinject.registry": {"mpsd.base"},
    "faultinject.evidence": {"mpsd.base"},
    "faultinject.programs": {
        "faultinject.registry",
        "mpsd.base",
        "mpsd.failover",
        "mpsd.gpu.simulated",
        "mpsd.wire",
        "mpsd.zones",
        "mpsd_client",
        "mpsd_libcuda",
    },
    "faultinject.rig": {
        "faultinject.evidence",
        "faultinject.programs",
        "faultinject.registry",
        "mpsd.base",
        "mpsd.gpu",
        "mpsd.gpu.nvidia",
        "mpsd.gpu.simulated",
        "mpsd.os",
        "mpsd_client",
    },
    "faultinject.campaigns": {
        "faultinject.evidence",
        "faultinject.programs",
        "faultinject.registry",
        "faultinject.rig",
        "mpsd.base",
        "mpsd.core",
        "mpsd.gpu",
        "mpsd.gpu.nvidia",
        "mpsd.gpu.simulated",
        "mpsd_client",
    },
}
# Remaining cycles between modules of one package; the list may only shrink.
_MACHINE = "mpsd.gpu.simulated.machine"
_MPS = "mpsd.gpu.simulated.mps"
_MEASURE = "faultinject.campaigns.measure"
KNOWN_CYCLES: tuple[set[str], ...] = (
    {"mpsd.core.domains", "mpsd.core.slots"},
    {f"{_MACHINE}.{name}" for name in ("terminating", "faulting", "machine", "isolation")},
    {"mpsd.gpu.simulated.calls", "mpsd.gpu.simulated.service"},
    {f"{_MPS}.controldaemon", f"{_MPS}.commands"},
    {f"{_MPS}.start", f"{_MPS}.control"},
    {f"faultinject.programs.devices.{name}" for name in ("simulated", "nvidia", "driver", "standin", "base")},
    {f"{_MEASURE}.clients.zones", f"{_MEASURE}.clients.farzones"},
    {
        f"{_MEASURE}.{name}"
        for name in ("failover.secondinstance", "failover.offender", "failover.survivors", "clients.roles")
    },
    {f"{_MEASURE}.failover.rounds", f"{_MEASURE}.failover.cases"},
    {"kmod.command", "kmod.machine", "kmod.modules", "kmod.errors"},
)
NESTED = {"mpsd.gpu.nvidia", "mpsd.gpu.simulated"}
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
    "builtins",
    "ctypes",
    "datetime",
    "io",
    "mmap",
    "pathlib",
    "signal",
    "structlog",
    "uuid",
}


@cache
def sources() -> Mapping[str, Path]:
    """Map module name to file, for all code but the tests."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


@cache
def imports(module: str) -> tuple[str, ...]:
    """Return the full names that a module imports, inside functions and under TYPE_CHECKING too."""
    path, found = sources()[module], []
    here = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*here[: len(here) - node.level + 1], *([node.module] if node.module else [])])
            source = base if node.level else str(node.module)
            for alias in node.names:
                full = f"{source}.{alias.name}"
                found.append(full if full in sources() else source)
    return tuple(found)


def package_of(module: str) -> str:
    """Return the package of a module: the module itself if it may stand outside a package."""
    parts = module.split(".")
    if parts[0] not in ("mpsd", "faultinject"):
        return parts[0]
    if ".".join(parts[:3]) in NESTED:
        return ".".join(parts[:3])
    return module if module in FLAT else ".".join(parts[:2])


def edges() -> Iterator[tuple[str, str, str, str]]:
    """Yield (package, package it imports, module, module it imports) for imports that leave a package."""
    for module in sources():
        for target in imports(module):
            if target in sources() and package_of(target) != package_of(module):
                yield package_of(module), package_of(target), module, target


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return one cycle of a graph; empty if there is none."""
    state: dict[str, int] = {}

    def visit(node: str, path: list[str]) -> list[str]:
        if state.get(node) == 1:
            return [*path[path.index(node) :], node]
        if state.get(node) == 2:
            return []
        state[node] = 1
        for other in sorted(graph.get(node, ())):
            if found := visit(other, [*path, node]):
                return found
        state[node] = 2
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def test_imports_run_one_way() -> None:
    wrong = []
    for source, target, module, name in edges():
        if source not in FREE and target not in ALLOWED[source]:
            wrong.append(f"{module} ({source}) imports {name} ({target})")
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_the_assembly_the_harness_or_the_tests() -> None:
    wrong = []
    for module in sources():
        for target in imports(module):
            top = target.split(".")[0]
            if top in ("faultinject", "tests") and module.split(".")[0] != top:
                wrong.append(f"{module} imports {target}")
            outside = package_of(module) not in FREE
            if outside and (target == ASSEMBLY or target.startswith(f"{ASSEMBLY}.")):
                wrong.append(f"{module} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_no_cycle_between_packages() -> None:
    graph: dict[str, set[str]] = {}
    for source, target, *_ in edges():
        graph.setdefault(source, set()).add(target)
    assert not cycle(graph), " -> ".join(cycle(graph))


def test_no_cycle_between_the_modules_of_a_package() -> None:
    graph: dict[str, set[str]] = {}
    for module in sources():
        # mpsd_client/__init__.py imports its modules, which import the package for its version.
        inner = {t for t in imports(module) if t in sources() and package_of(t) == package_of(module)}
        graph[module] = inner - {module, "mpsd_client"}
    for known in KNOWN_CYCLES:
        assert cycle({module: graph[module] & known for module in known}), f"no cycle any more: {known}"
        for module in known:
            graph[module] -= known
    assert not cycle(graph), " -> ".join(cycle(graph))


def test_every_package_is_small_and_none_is_flat() -> None:
    modules: dict[Path, int] = {}
    flat = []
    for module, path in sources().items():
        if path.name != "__init__.py":
            modules[path.parent] = modules.get(path.parent, 0) + 1
        flat_in = path.parent in (PACKAGES["mpsd"], PACKAGES["faultinject"])
        if flat_in and path.stem not in ("__init__", "__main__"):
            flat.append(module)
    assert not flat
    large = {
        str(path.relative_to(ROOT)): count
        for path, count in modules.items()
        if count > MAX_MODULES and "kmod_patches" not in path.parts
    }
    assert not large
    scripts = {PACKAGES["examples"]}
    assert all((path / "__init__.py").exists() for path in {*modules} - scripts)


def test_every_package_has_its_rule() -> None:
    """A package that no rule names could import anything."""
    names = {package_of(module) for module in sources()}
    assert names - FREE == {*ALLOWED}


def test_all_code_is_in_a_package_that_these_tests_know() -> None:
    known = {path.resolve() for path in sources().values()}
    skipped = {"tests", "build", "dist"}
    wrong = [
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if not any(part in skipped or part.startswith(".") for part in path.relative_to(ROOT).parts)
        and path.resolve() not in known
    ]
    assert sorted(set(wrong) - LOOSE) == []


def test_only_known_modules_import_by_a_computed_name() -> None:
    found = {
        module
        for module, path in sources().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Attribute) and node.func.attr in ("import_module", "__import__"))
            or (isinstance(node.func, ast.Name) and node.func.id in ("import_module", "__import__"))
        )
    }
    assert found == {*DYNAMIC}


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
        ({"a": {"a"}}, ["a", "a"]),
    ],
)
def test_a_cycle_is_found(graph: Mapping[str, set[str]], expected: list[str]) -> None:
    assert cycle(graph) == expected


def test_core_touches_nothing_of_the_world() -> None:
    wrong = [
        f"{module} imports {target}"
        for module in sources()
        if package_of(module) == "mpsd.core"
        for target in imports(module)
        if target.split(".")[0] in FORBIDDEN_IN_CORE
    ]
    wrong += [
        f"{module} calls {node.func.id}()"
        for module, path in sources().items()
        if package_of(module) == "mpsd.core"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("open", "print")
    ]
    assert not wrong, "\n".join(wrong)


def test_wire_and_keeper_need_the_standard_library_alone() -> None:
    wrong = []
    for module, path in sources().items():
        if package_of(module) != "mpsd.wire" and module != "mpsd.fdstore.keeper":
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
    """600 lines; more only with `Long because ...` at the head, which names the one idea of the file."""
    wrong = []
    for path in sorted((ROOT / root).rglob("*.py")):
        text = path.read_text()
        lines = text.count("\n")
        head = ast.get_docstring(ast.parse(text)) or ""
        if lines > MAX_LINES and "long because" not in head.lower():
            wrong.append(f"{path.relative_to(ROOT)} has {lines} lines, at most {MAX_LINES} are allowed")
    assert not wrong, "\n".join(wrong)


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for module, path in sources().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{module}.{node.name}:{node.lineno}", node


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
    assert not [module for module in sources() if module.split(".")[-1] in names]


def test_the_page_lists_packages_below_those_that_they_import() -> None:
    page = (ROOT / "mpsd/docs/architecture.md").read_text().split("\n## Packages\n")[1].split("\n## ")[0]
    rows = [re.findall(r"`([^`]+)`", cell) for cell in re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)]
    place = {name.rpartition("/")[2]: number for number, names in enumerate(rows) for name in names}
    listed = {package: allowed & place.keys() for package, allowed in ALLOWED.items() if package in place}
    assert {name for name in ALLOWED if name.startswith("mpsd.")} <= place.keys()
    assert [
        (package, other)
        for package, allowed in listed.items()
        for other in allowed
        if place[other] >= place[package]
    ] == []
