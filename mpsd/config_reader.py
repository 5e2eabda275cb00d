"""Reads a configuration into mpsd.config's tree: file, environment, defaults; and prints it back.

Every error names the source, the key, what is wrong, and the nearest valid key or the valid range.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, get_args, get_type_hints

from mpsd.config import (
    DEFAULT_FILE,
    SCHEMA_VERSION,
    BackendName,
    Config,
    check_rules,
    default_directories,
)
from mpsd.errors import ConfigError

LARGEST = 1 << 20
"""Bytes of a configuration file: more is none."""
OTHER_VARIABLES = (
    "MPSD_CONFIG",
    "MPSD_SOCKET",
    "MPSD_SIM_DIR",
    "MPSD_VENV",
    "MPSD_DIE_BEFORE_EFFECT",
    # Programs', and of what they are started with.
    "MPSD_LIBCUDA_DIR",
    "MPSD_REAL_LIBCUDA",
    "MPSD_VAULT",
    "MPSD_VAULT_SOCKET",
    "MPSD_VAULT_TOKEN",
    "MPSD_FAILOVER",
    "MPSD_FAILOVER_MIRROR",
    "MPSD_FAILOVER_OPAQUE",
    "MPSD_FAILOVER_SOCKET",
    "MPSD_FAILOVER_AUTOPSY_MS",
    "MPSD_FAILOVER_CUTTERS",
    "MPSD_FAILOVER_GIVE_BACK",
    "MPSD_FAILOVER_PATIENCE_MS",
    "MPSD_FAILOVER_READS",
    "MPSD_FAILOVER_RELAY",
    "MPSD_FAILOVER_SETTLE_MS",
    "MPSD_FAILOVER_UNDO_MIB",
    "MPSD_FAILOVER_UNSURE",
    "MPSD_FAILOVER_VALIDATE",
    "MPSD_WINDOW_BASE",
    "MPSD_WINDOW_BYTES",
    "MPSD_FAR_BYTES",
    "MPSD_ZONE_BUDGET",
    "MPSD_ZONE_BYTES",
    "MPSD_QUARANTINE_BYTES",
    "MPSD_QUARANTINE_S",
    "MPSD_HOST_GUARD_BYTES",
    "MPSD_PLACE_BASE",
    "MPSD_TURN",
    "MPSD_TURN_MARK",
)
"""MPSD_ variables that are no keys and still mean something."""
# The harness's and the tests' own, and what Kubernetes sets where there is a service of this name.
_OTHER_PREFIXES = (
    "MPSD_FAULTINJECT",
    "MPSD_TEST_",
    "MPSD_CONTRACT_TEST",
    "MPSD_SETUP_",
    "MPSD_STANDIN_",
    "MPSD_SUITE_",
    "MPSD_SERVICE_",
    "MPSD_PORT",
)


def load(
    path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    uid: int | None = None,
    backend: str | None = None,
) -> Config:
    """The effective configuration, for an mpsd that this user runs (by default the caller).

    `backend`: that of the command line, before the file's and the environment's.
    A `path` that is given must exist; $MPSD_CONFIG too; the default file may be absent.
    Raises ConfigError.
    """
    env = os.environ if environ is None else environ
    named = path or env.get("MPSD_CONFIG")
    source = Path(named) if named else DEFAULT_FILE
    table = _read_file(source, optional=not named)
    config = _build(Config, table, str(source), "")
    config = _override(config, env)
    given = [f"${name}" for name in _given(env)]
    if backend is not None:
        config = replace(config, backend=BackendName(backend))
        given = [*(name for name in given if name != "$MPSD_BACKEND"), "--backend"]
    missing: dict[str, Any] = {
        key: value
        for key, value in default_directories(os.geteuid(), env).items()
        if not getattr(config, key)
    }
    config = replace(config, **missing)
    where = " with ".join([str(source), *given])
    check_rules(
        config,
        where,
        os.geteuid() if uid is None else uid,
        config.simulated.dir or env.get("MPSD_SIM_DIR", ""),
    )
    return config


def mistakes(path: str | Path | None, environ: Mapping[str, str]) -> list[ConfigError]:
    """Everything that is wrong with a file and the variables over it, as far as the file can be read at all.
    Raises ConfigError for one that cannot.
    """
    named = path or environ.get("MPSD_CONFIG")
    source = Path(named) if named else DEFAULT_FILE
    found: list[ConfigError] = []
    for key, raw in _read_file(source, optional=not named).items():
        inner = raw.items() if isinstance(raw, dict) and raw else ()
        for alone in [{key: {name: value}} for name, value in inner] or [{key: raw}]:
            try:
                _build(Config, alone, str(source), "")
            except ConfigError as error:
                if str(error) not in map(str, found):
                    found.append(error)
    for name in _given(environ):
        try:
            _override(Config(), {name: environ[name]})
        except ConfigError as error:
            found.append(error)
    if not found:
        try:
            load(path, environ)
        except ConfigError as error:
            found.append(error)
    return found


def keys() -> Iterator[tuple[str, str, Field[Any]]]:
    """(section or "", key, field) of every key, in the order of the schema."""
    for top in fields(Config):
        section = _section(top)
        if section is None:
            yield "", top.name, top
        else:
            for inner in fields(section):
                yield top.name, inner.name, inner


def to_toml(config: Config) -> str:
    """The configuration as a commented TOML file that reads back to the same values."""
    lines: list[str] = []
    current = ""
    for section, key, spec in keys():
        if section != current:
            lines += ["", f"[{section}]"]
            current = section
        unit = f" [{spec.metadata['unit']}]" if spec.metadata["unit"] else ""
        value = getattr(getattr(config, section) if section else config, key)
        lines.append(f"# {spec.metadata['doc']}{unit}")
        lines.append(f"# {key} is not set" if value is None else f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _section(spec: Field[Any]) -> type[Any] | None:
    """The dataclass behind a section; None for a plain key."""
    factory: Any = spec.default_factory
    return factory if is_dataclass(factory) else None  # type: ignore[return-value]


def _read_file(path: Path, *, optional: bool) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ConfigError(f"{path} is larger than {LARGEST >> 10} KiB", remedy="name the right file")
        table = tomllib.loads(content.decode())
    except FileNotFoundError as error:
        if optional:
            return {}
        raise ConfigError(f"there is no configuration file {path}", remedy="check the path") from error
    except NotADirectoryError as error:
        raise ConfigError(f"{path} is below what is no directory", remedy="check the path") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a directory", remedy="name the file in it") from error
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", remedy="check its owner and mode"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}", remedy="save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}", remedy="mend that line") from error
    version = table.get("schema_version", SCHEMA_VERSION)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: schema_version {version} is newer than this mpsd, which knows {SCHEMA_VERSION}",
            remedy="upgrade mpsd or write the file for this version",
        )
    return table


def unknown_variables(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Each MPSD_ variable that nothing of this project reads, with a remedy."""
    valid = [*OTHER_VARIABLES, *(name for _, _, name in _variables())]
    found = []
    for name in sorted(environ):
        if name.startswith("MPSD_") and name not in valid and not name.startswith(_OTHER_PREFIXES):
            near = difflib.get_close_matches(name, valid, n=1)
            found.append(
                (name, f"did you mean {near[0]}?" if near else "unset it; mpsd config show lists the keys")
            )
    return found


def _variables() -> Iterator[tuple[str, Field[Any], str]]:
    """(section or "", field, the environment variable) of every key."""
    for section, key, spec in keys():
        yield section, spec, "_".join(part for part in ("MPSD", section, key) if part).upper()


def _given(environ: Mapping[str, str]) -> list[str]:
    """The variables that set a key."""
    return sorted(name for _, _, name in _variables() if name in environ)


def _override(config: Config, environ: Mapping[str, str]) -> Config:
    """Apply MPSD_<SECTION>_<KEY>. Other MPSD_ variables belong to others and are left alone."""
    for section, spec, name in _variables():
        key = spec.name
        text = environ.get(name)
        if text is None:
            continue
        owner: Any = getattr(config, section) if section else config
        value = _convert(_environment_value(text), _hint(type(owner), key), spec, f"${name}", key)
        changed: Any = replace(owner, **{key: value})
        update: dict[str, Any] = {section: changed}
        config = replace(config, **update) if section else changed
    return config


def _environment_value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _build(kind: type[Any], table: Mapping[str, Any], source: str, prefix: str) -> Any:
    specs = {spec.name: spec for spec in fields(kind)}
    values: dict[str, object] = {}
    for key, raw in table.items():
        spec = specs.get(key)
        if spec is None:
            raise _unknown_key(prefix + key, source)
        section = _section(spec)
        if section is not None:
            if not isinstance(raw, dict):
                raise ConfigError(f"{source}: {key} is a section", remedy=f"write [{key}] and its keys below")
            values[key] = _build(section, raw, source, f"{key}.")
        else:
            values[key] = _convert(raw, _hint(kind, key), spec, source, prefix + key)
    return kind(**values)


def _unknown_key(key: str, source: str) -> ConfigError:
    valid = [f"{section}.{name}" if section else name for section, name, _ in keys()]
    if "." not in key:
        valid += sorted({section for section, _, _ in keys() if section})
    near = difflib.get_close_matches(key, valid, n=1)
    tail = key.rpartition(".")[2]
    same_name = [name for name in valid if name.rpartition(".")[2] == tail]
    meant = (same_name or near)[:1]
    hint = f"did you mean {meant[0]!r}?" if meant else "mpsd config show lists the keys"
    return ConfigError(f"{source}: unknown key {key!r}", remedy=hint)


def _hint(kind: type[Any], key: str) -> Any:
    return get_type_hints(kind)[key]


def _convert(raw: object, hint: Any, spec: Field[Any], source: str, key: str) -> object:
    """One TOML value as the type that the schema wants, range checked."""
    options = (
        [option for option in get_args(hint) if option is not NoneType] if NoneType in get_args(hint) else []
    )
    wanted = options[0] if options else hint
    where = f"{source}: {key}"
    if isinstance(wanted, type) and issubclass(wanted, StrEnum):
        return _choice(raw, wanted, where)
    if get_args(wanted):
        return _container(raw, wanted, spec, where)
    if wanted is str:
        return _text(raw, where)
    if wanted is bool:
        if not isinstance(raw, bool):
            raise ConfigError(f"{where} must be true or false, not {raw!r}", remedy="no quotes")
        return raw
    return _number(raw, wanted, spec, where)


def _choice(raw: object, wanted: type[StrEnum], where: str) -> StrEnum:
    text = str(raw).lower() if isinstance(raw, bool) else raw
    valid = [str(member) for member in wanted]
    if text not in valid:
        near = difflib.get_close_matches(str(text), valid, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(valid)}"
        raise ConfigError(f"{where} = {raw!r} is none of {', '.join(valid)}", remedy=hint)
    return wanted(str(text))


def _text(raw: object, where: str) -> str:
    if not isinstance(raw, str):
        raise ConfigError(f"{where} must be text, not {raw!r}", remedy="put it in quotes")
    if not raw.isprintable():
        raise ConfigError(f"{where} holds control characters: {raw!r}", remedy="remove them")
    return raw


def _number(raw: object, wanted: type[int] | type[float], spec: Field[Any], where: str) -> float:
    allowed = (int, float) if wanted is float else (int,)
    if isinstance(raw, bool) or not isinstance(raw, allowed):
        name = "a number" if wanted is float else "a whole number"
        raise ConfigError(f"{where} must be {name}, not {raw!r}", remedy=spec.metadata["doc"])
    low, high, unit = (spec.metadata[part] for part in ("low", "high", "unit"))
    # Written so that NaN, which compares false with everything, is refused too.
    if not ((low is None or raw >= low) and (high is None or raw <= high)):
        span = f"{low:.15g} to {high:.15g}{' ' + unit if unit else ''}"
        raise ConfigError(f"{where} = {raw} is out of range", remedy=f"use {span}")
    return wanted(raw)


def _container(raw: object, wanted: Any, spec: Field[Any], where: str) -> object:
    """The two that the schema has: lists of lists of text, and a table from text to text."""
    if get_args(wanted) == (str, str):
        if not isinstance(raw, dict):
            raise ConfigError(f"{where} must be a table, not {raw!r}", remedy=spec.metadata["doc"])
        for name, value in raw.items():
            if not re.fullmatch(spec.metadata["pattern"], _text(value, f"{where}.{name}")):
                raise ConfigError(f"{where}.{name} = {value!r} is malformed", remedy=spec.metadata["doc"])
        return MappingProxyType(dict(raw))
    if not isinstance(raw, list) or not all(isinstance(group, list) and group for group in raw):
        raise ConfigError(
            f"{where} must be a list of lists, not {raw!r}", remedy='write [["GPU-a", "GPU-b"]]'
        )
    return tuple(tuple(_text(item, where) for item in group) for group in raw)


def _toml(value: object) -> str:
    if isinstance(value, StrEnum):
        return str(value) if value in ("true", "false") else json.dumps(str(value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
