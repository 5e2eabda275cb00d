"""The reader of the configuration: file, environment and defaults become mpsd.config.schema's tree.

Every error names the source, the key, the mistake, and the nearest valid key or the valid range.
`to_toml` prints a configuration that reads back to the same values.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, get_args, get_type_hints

from mpsd.base import debug
from mpsd.base.errors import ConfigError
from mpsd.config.basic import is_advanced
from mpsd.config.earlier import VARIABLES as EARLIER_VARIABLES
from mpsd.config.earlier import replace_earlier
from mpsd.config.schema import (
    DEFAULT_FILE,
    SCHEMA_VERSION,
    BackendName,
    Config,
    check_rules,
    default_directories,
)

MAX_FILE_BYTES = 1 << 20
"""Size limit of a configuration file [bytes]. A larger file is refused."""
OTHER_VARIABLES = (
    "MPSD_CONFIG",
    "MPSD_SOCKET",
    "MPSD_LIBCUDA_DIR",
    "MPSD_REAL_LIBCUDA",
    "MPSD_VAULT_TOKEN",
    "MPSD_FAILOVER",
    "MPSD_FAILOVER_READS",
    "MPSD_FAILOVER_KERNELS",
    # For tests.
    "MPSD_DEBUG",
    "MPSD_SIM_DIR",
    # mpsd-run and mpsd-standby set these for the programs that they start.
    "MPSD_DEVICE_NUMBERS",
    "MPSD_FAILOVER_SOCKET",
    "MPSD_PROTECTION",
    "MPSD_VAULT_SOCKET",
    "MPSD_TURN",
    "MPSD_TURN_MARK",
)
"""MPSD_ variables that have a meaning and are not configuration keys. The first eight are for users."""
# Variables of the harness and the tests, and variables that Kubernetes sets for a service named mpsd.
_OTHER_PREFIXES = (
    "MPSD_FAULTINJECT_",
    "MPSD_REVISION",
    "MPSD_TEST_",
    "MPSD_CONTRACT_TEST",
    "MPSD_SETUP_",
    "MPSD_STANDIN_",
    "MPSD_SUITE_",
    "MPSD_VENV",
    "MPSD_PYTHON",
    "MPSD_SERVICE_",
    "MPSD_PORT",
)


def load(
    path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    uid: int | None = None,
    backend: str | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Config:
    """Return the effective configuration of an mpsd that user `uid` runs (default: the caller).

    `backend`: value of the command line; it wins over the file and the environment. `warn` receives a line
    if keys of an earlier release are set.
    `path` and $MPSD_CONFIG must exist if given; the default file may be absent.
    Raise ConfigError.
    """
    env = os.environ if environ is None else environ
    named = path or env.get("MPSD_CONFIG")
    source = Path(named) if named else DEFAULT_FILE
    earlier = replace_earlier(_read_file(source, optional=not named), env, str(source))
    if earlier.warning:
        warn(earlier.warning)
    env = earlier.environ
    config = _build(Config, earlier.table, str(source), "")
    config = _override(config, env)
    given = [f"${name}" for name in _set_variables(env)]
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
    """Return all mistakes of a file and of the variables that override it.

    Raise ConfigError if the file cannot be read.
    """
    named = path or environ.get("MPSD_CONFIG")
    source = Path(named) if named else DEFAULT_FILE
    earlier = replace_earlier(_read_file(source, optional=not named), environ, str(source))
    found: list[ConfigError] = []
    for key, raw in earlier.table.items():
        inner = raw.items() if isinstance(raw, dict) and raw else ()
        for alone in [{key: {name: value}} for name, value in inner] or [{key: raw}]:
            try:
                _build(Config, alone, str(source), "")
            except ConfigError as error:
                if str(error) not in map(str, found):
                    found.append(error)
    for name in _set_variables(earlier.environ):
        try:
            _override(Config(), {name: earlier.environ[name]})
        except ConfigError as error:
            found.append(error)
    if not found:
        try:
            load(path, environ)
        except ConfigError as error:
            found.append(error)
    return found


def keys() -> Iterator[tuple[str, str, Field[Any]]]:
    """Yield (section or "", key, field) of every key, in the order of the schema."""
    for top in fields(Config):
        section = _section(top)
        if section is None:
            yield "", top.name, top
        else:
            for inner in fields(section):
                yield top.name, inner.name, inner


def to_toml(config: Config, *, advanced: bool = False) -> str:
    """Return the configuration as a commented TOML file that reads back to the same values.

    `advanced`: with the advanced keys that have their default, too.
    """
    lines: list[str] = []
    current = ""
    for section, key, spec in keys():
        value, default = (getattr(getattr(of, section) if section else of, key) for of in (config, Config()))
        if is_advanced(section, key) and value == default and not advanced:
            continue
        if section != current:
            lines += ["", f"[{section}]"]
            current = section
        unit = f" [{spec.metadata['unit']}]" if spec.metadata["unit"] else ""
        lines.append(f"# {spec.metadata['doc']}{unit}")
        lines.append(f"# {key} is not set" if value is None else f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _section(spec: Field[Any]) -> type[Any] | None:
    """Return the dataclass of a section; None for a plain key."""
    factory: Any = spec.default_factory
    return factory if is_dataclass(factory) else None  # type: ignore[return-value]


def _read_file(path: Path, *, optional: bool) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path} is larger than {MAX_FILE_BYTES >> 10} KiB", remedy="name a configuration file"
            )
        table = tomllib.loads(content.decode())
    except FileNotFoundError as error:
        if optional:
            return {}
        raise ConfigError(f"no configuration file {path}", remedy="check the path") from error
    except NotADirectoryError as error:
        raise ConfigError(f"a parent of {path} is not a directory", remedy="check the path") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a directory", remedy="name a file in it") from error
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", remedy="check its owner and mode"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}", remedy="save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        remedy = 'correct that line; a text needs quotes: protect = "guard"'
        raise ConfigError(f"{path} is not TOML: {error}", remedy=remedy) from error
    version = table.get("schema_version", SCHEMA_VERSION)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: schema_version {version} is newer than this mpsd, which reads version {SCHEMA_VERSION}",
            remedy="upgrade mpsd, or write the file for this version",
        )
    return table


def unknown_variables(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return each MPSD_ variable and each field of MPSD_DEBUG without a meaning, with a remedy."""
    valid = [*OTHER_VARIABLES, *EARLIER_VARIABLES, *(name for _, _, name in _variables())]
    found = []
    for name in sorted(environ):
        if name in debug.RETIRED:
            found.append((name, f"set {debug.RETIRED[name]} instead"))
        elif name.startswith("MPSD_") and name not in valid and not name.startswith(_OTHER_PREFIXES):
            near = difflib.get_close_matches(name, valid, n=1)
            found.append(
                (
                    name,
                    f"did you mean {near[0]}?" if near else "unset it; mpsd config show --all lists the keys",
                )
            )
    unknown = sorted(debug.fields(environ).keys() - set(debug.FIELDS))
    found += [(f"{debug.VARIABLE}={name}", "mpsd help knobs lists the names") for name in unknown]
    return found


def _variables() -> Iterator[tuple[str, Field[Any], str]]:
    """Yield (section or "", field, environment variable) of every key."""
    for section, key, spec in keys():
        yield section, spec, "_".join(part for part in ("MPSD", section, key) if part).upper()


def _set_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables in `environ` that set a key."""
    return sorted(name for _, _, name in _variables() if name in environ)


def _override(config: Config, environ: Mapping[str, str]) -> Config:
    """Apply MPSD_<SECTION>_<KEY>. Ignore other MPSD_ variables: other programs read them."""
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
                raise ConfigError(
                    f"{source}: {key} is a section, not a key", remedy=f"write [{key}] and its keys below it"
                )
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
    hint = f"did you mean {meant[0]!r}?" if meant else "mpsd config show --all lists the keys"
    return ConfigError(f"{source}: unknown key {key!r}", remedy=hint)


def _hint(kind: type[Any], key: str) -> Any:
    return get_type_hints(kind)[key]


def _convert(raw: object, hint: Any, spec: Field[Any], source: str, key: str) -> object:
    """Return a TOML value as the type that the schema requires, with its range checked."""
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
            raise ConfigError(f"{where} must be true or false, not {raw!r}", remedy="write it without quotes")
        return raw
    return _number(raw, wanted, spec, where)


def _choice(raw: object, wanted: type[StrEnum], where: str) -> StrEnum:
    text = str(raw).lower() if isinstance(raw, bool) else raw
    valid = [str(member) for member in wanted]
    if text not in valid:
        near = difflib.get_close_matches(str(text), valid, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(valid)}"
        raise ConfigError(f"{where} = {raw!r} is not one of {', '.join(valid)}", remedy=hint)
    return wanted(str(text))


def _text(raw: object, where: str) -> str:
    if not isinstance(raw, str):
        raise ConfigError(f"{where} must be text, not {raw!r}", remedy="put it in quotes")
    if not raw.isprintable():
        raise ConfigError(f"{where} contains control characters: {raw!r}", remedy="remove them")
    return raw


def _number(raw: object, wanted: type[int] | type[float], spec: Field[Any], where: str) -> float:
    allowed = (int, float) if wanted is float else (int,)
    if isinstance(raw, bool) or not isinstance(raw, allowed):
        name = "a number" if wanted is float else "a whole number"
        raise ConfigError(f"{where} must be {name}, not {raw!r}", remedy=spec.metadata["doc"])
    low, high, unit = (spec.metadata[part] for part in ("low", "high", "unit"))
    # This form refuses NaN too, which compares false with every number.
    if not ((low is None or raw >= low) and (high is None or raw <= high)):
        span = f"{low:.15g} to {high:.15g}{' ' + unit if unit else ''}"
        raise ConfigError(f"{where} = {raw} is out of range", remedy=f"use {span}")
    return wanted(raw)


def _container(raw: object, wanted: Any, spec: Field[Any], where: str) -> object:
    """Return a container of the schema: a list of lists of text, or a table from text to text or a choice."""
    of = get_args(wanted)
    if of[:1] == (str,) and isinstance(of[-1], type) and issubclass(of[-1], StrEnum):
        if not isinstance(raw, dict):
            raise ConfigError(f"{where} must be a table, not {raw!r}", remedy=spec.metadata["doc"])
        return MappingProxyType(
            {name: _choice(value, of[-1], f"{where}.{name}") for name, value in raw.items()}
        )
    if of == (str, str):
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
