"""Names that the source of one tree fixes: fields of events, values, fault classes, counters, variables.

record.py of tests/data/upgrade runs this at revision 50d9fcb, and the upgrade tests run it at the present
one. It therefore finds modules by what they define, not by their path.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

PREFIX = "source "
"""Parts of names.json that come from here start with this."""
_VARIABLE = re.compile(r"MPSD_[A-Z0-9_]*[A-Z0-9]")
_IN_C = re.compile(rf'"({_VARIABLE.pattern})"')
_LISTS = ("OTHER_VARIABLES", "_OTHER_PREFIXES")
"""Lists of known variables. They name variables that another part reads."""
_SHOWN = ("state", "standing", "outcome", "mode", "role", "trigger", "code")
"""Keys of JSON whose values are plain strings in some places of the source."""


def static_names(root: Path) -> dict[str, list[str]]:
    """Return the names that the source in `root` fixes. Its package mpsd must be the one that is imported."""
    trees = [ast.parse(path.read_text()) for path in sorted((root / "mpsd").rglob("*.py"))]
    modules = list(_modules(root))
    found: dict[str, list[str]] = {
        "event kinds": list(event_fields(trees)),
        "event fields": [f"{kind}.{key}" for kind, keys in event_fields(trees).items() for key in keys],
        "counters": [name for tree in trees for name in _counters(tree)],
        "plain values": [text for tree in trees for text in _plain_values(tree)],
        "fault classes": list(_one(modules, "CLASSES", "FaultClass")),
        "errors": [f"{e.code}: {e.exit_code}" for e in _errors(modules)],
        "metric label values": list(_label_values(_one(modules, "Collector", "BUCKETS_S"))),
        "variables of the configuration": [
            name for *_, name in _one(modules, "_variables", "OTHER_VARIABLES")()
        ],
        **{f"variables of {part}": list(names) for part, names in _variables(root).items()},
        **{f"values of {name}": values for name, values in sorted(_values(modules).items())},
    }
    return {f"{PREFIX}{part}": sorted(set(names)) for part, names in found.items()}


def _modules(root: Path) -> Iterator[ModuleType]:
    for path in sorted((root / "mpsd").rglob("*.py")):
        if path.stem != "__main__":
            parts = path.relative_to(root).with_suffix("").parts
            module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
            assert module.__file__ is not None and Path(module.__file__).samefile(path), module
            yield module


def _one(modules: list[ModuleType], name: str, beside: str) -> Any:
    """Return the one object of this name, from the modules that have the other name too."""
    having = [vars(module) for module in modules if {name, beside} <= vars(module).keys()]
    (found,) = {id(names[name]): names[name] for names in having}.values()
    return found


# -- events -----------------------------------------------------------------------------------------------


def event_fields(trees: list[ast.Module]) -> dict[str, list[str]]:
    """Return, for each kind of event, the fields that every publication of it has.

    The records of `fault` and `failover` are one argument: their keys are those of the answers.
    """
    found: dict[str, set[str]] = {}
    for call in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if getattr(call.func, "attr", "") != "publish" or not call.args:
            continue
        kinds = {text for node in ast.walk(call.args[0]) if (text := _text(node)) is not None}
        keys = {word.arg for word in call.keywords}
        assert not kinds or None not in keys, "fields that the source does not name"
        for kind in kinds:
            found[kind] = found.get(kind, set(filter(None, keys))) & set(filter(None, keys))
    return {kind: sorted(keys) for kind, keys in sorted(found.items())}


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


# -- values -----------------------------------------------------------------------------------------------


def _values(modules: list[ModuleType]) -> dict[str, list[str]]:
    """Return the string values of every enumeration, and the names and numbers of those in the model."""
    found: dict[str, list[str]] = {}
    for module in modules:
        for kind in dict.fromkeys(v for v in vars(module).values() if isinstance(v, type)):
            if not issubclass(kind, Enum) or kind.__module__ != module.__name__ or kind.__name__[0] == "_":
                continue
            values = [member.value for member in kind]
            if values and all(isinstance(value, str) for value in values):
                assert kind.__name__ not in found, kind
                found[kind.__name__] = sorted(values)
            elif module.__name__.endswith(".model"):
                # Records show these by name.
                found[kind.__name__] = [f"{member.name.lower()} = {member.value}" for member in kind]
    return found


def _plain_values(tree: ast.Module) -> Iterator[str]:
    """Return `outcome: evicted` for each dictionary display with such a pair."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if (name := _text(key)) in _SHOWN and (text := _text(value)) is not None:
                    yield f"{name}: {text}"


def _errors(modules: list[ModuleType]) -> list[Any]:
    base = _one(modules, "MpsdError", "ConfigError")
    found, left = [], [base]
    while left:
        found.append(left.pop())
        left += found[-1].__subclasses__()
    return found


# -- counters and metrics -----------------------------------------------------------------------------------


def _counters(tree: ast.Module) -> Iterator[str]:
    """Return the counters that a module counts, and `vault_{}` for a prefix before the names of counters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "count" and node.args:
            if ast.unparse(node.func) == "draft.count":
                yield from filter(None, [_text(node.args[0])])
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
            if ast.unparse(node.target.value).endswith("counters"):
                yield _pattern(node.target.slice)
        elif isinstance(node, ast.DictComp) and "counters.items()" in ast.unparse(node.generators[0].iter):
            yield _pattern(node.key)
        elif isinstance(node, ast.FunctionDef) and node.name in ("extra_counters", "totals"):
            keys = [key for d in ast.walk(node) if isinstance(d, ast.Dict) for key in d.keys]
            yield from filter(None, map(_text, keys))


def _pattern(node: ast.expr) -> str:
    """Return a constant, or a format string with {} for what it inserts."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "{}" for part in node.values)
    return _text(node) or ""


def _label_values(collector: Any) -> Iterator[str]:
    """Return `metric{label=value}` of what the exporter itself names, from an idle daemon's answers."""
    held = ["leases_held", "vault_bytes", "vault_held", "vault_dead_bytes", "vault_dead_held"]
    status: Mapping[str, Any] = {
        "domains": [],
        "clients": [],
        "problems": [],
        "slots": [],
        "counters": dict.fromkeys([*held, "faults"], 1),
    }
    for family in collector(lambda: (status, [])).collect():
        for labels in (sample.labels for sample in family.samples):
            yield from (f"{family.name}{{{key}={value}}}" for key, value in labels.items() if key != "le")


# -- variables --------------------------------------------------------------------------------------------


def _variables(root: Path) -> dict[str, set[str]]:
    """Return the environment variables that each part of mpsd names, by part."""
    libcuda = root / "clients" / "libcuda" / "src"
    texts = [path.read_text() for kind in ("*.c", "*.h") for path in sorted(libcuda.rglob(kind))]
    return {
        "mpsd": _in_python(root / "mpsd"),
        "mpsd_client": _in_python(root / "clients" / "mpsd_client"),
        "libcuda": {name for text in texts for name in _IN_C.findall(text)},
    }


def _in_python(folder: Path) -> set[str]:
    found = set()
    for path in folder.rglob("*.py"):
        left: list[ast.AST] = [ast.parse(path.read_text())]
        while left:
            node = left.pop()
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in _LISTS:
                continue
            left += ast.iter_child_nodes(node)
            if (text := _text(node)) is not None and _VARIABLE.fullmatch(text):
                found.add(text)
    return found
