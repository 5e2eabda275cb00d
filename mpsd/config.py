"""The configuration: what every key means, its default, unit and range. One frozen tree, read once.

`Config` is the whole schema. The reader (mpsd.config_reader) walks these dataclasses, so a key that
is not here does not exist, and `mpsd config show` prints exactly what is here.

A value comes from, later ones win: the default below, the file, the environment. The variable for
`[domains] spare` is MPSD_DOMAINS_SPARE and the one for the top-level `run_dir` is MPSD_RUN_DIR; its
text is a TOML value, or a bare word where the key takes text. The file is $MPSD_CONFIG, else
/etc/mpsd/mpsd.toml, and may be absent.

Long because it is the one place where every key is explained.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mpsd.errors import ConfigError
from mpsd.limits import SOCKET_PATH_LIMIT
from mpsd.model import FailoverMode, IsolationMode, ZonePolicy

SCHEMA_VERSION = 1
# A socket of a control daemon by a slot's stable path (mpsd.layout), whose name may have so many bytes.
SLOT_NAME_BYTES = 24
LONGEST_IN_RUN_DIR = f"s/{'x' * SLOT_NAME_BYTES}/control_privileged"
DEFAULT_FILE = Path("/etc/mpsd/mpsd.toml")


class BackendName(StrEnum):
    NVIDIA = "nvidia"
    SIMULATED = "simulated"


class DomainMode(StrEnum):
    PER_USER = "per-user"
    SHARED = "shared"


class GuardSetting(StrEnum):
    """`auto` lets mpsd decide: on only for a class that measurements proved safe on this machine."""

    ON = "true"
    OFF = "false"
    AUTO = "auto"


class StoreKind(StrEnum):
    AUTO = "auto"
    SYSTEMD = "systemd"
    KEEPER = "keeper"


class LogFormat(StrEnum):
    AUTO = "auto"
    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _key(
    default: object,
    doc: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    pattern: str = "",
) -> Any:
    """A dataclass field that carries its documentation and its range (both ends allowed)."""
    metadata = {"doc": doc, "unit": unit, "low": low, "high": high, "pattern": pattern}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Simulated:
    """[simulated]: the simulated GPU, used only where backend = "simulated"."""

    dir: str = _key(
        "",
        "directory of the simulated node, which `python -m mpsd.gpu.simulated stop` then needs as --dir; "
        "empty: $MPSD_SIM_DIR, else $XDG_RUNTIME_DIR/mpsd-sim or /tmp/mpsd-sim-UID",
    )
    gpus: int = _key(1, "how many GPUs the simulated node has", low=1, high=16)
    isolation: bool = _key(False, "the simulated driver has the kernel part")


@dataclass(frozen=True, slots=True)
class Domains:
    """[domains]: which fault domains there are and how long things may take."""

    mode: DomainMode = _key(
        DomainMode.PER_USER, "per-user: a domain of its own for each user; shared: one for all users of a GPU"
    )
    private: bool = _key(
        False, "let nobody but its user, and root, reach a user's domain; not yet seen with a stock server"
    )
    spare: bool = _key(True, "keep a second, warm domain ready to take over when the active one faults")
    span: tuple[tuple[str, ...], ...] = _key(
        (), "lists of GPU UUIDs that one domain serves together, for clients that use several GPUs"
    )
    serve_default_path: bool = _key(False, "also serve default_path, for jobs that set nothing")
    default_path: str = _key("/tmp/nvidia-mps", "the pipe directory that libcuda uses when nothing is set")
    start_deadline_s: float = _key(
        20.0, "a control daemon with its server must be up by then", unit="s", low=1, high=600
    )
    stop_deadline_s: float = _key(
        5.0, "how long a control daemon may take to quit before it is killed", unit="s", low=0.1, high=600
    )
    start_retry_s: float = _key(
        1.0, "first pause after a failed start; doubles each time", unit="s", low=0.1, high=600
    )
    start_retry_max_s: float = _key(
        60.0, "longest pause between two tries to start a domain", unit="s", low=1, high=3600
    )
    laggard_report_s: float = _key(
        10.0,
        "a victim that has not left its faulted domain by then is reported",
        unit="s",
        low=0.1,
        high=3600,
    )
    kill_victims_after_s: float = _key(
        0.0,
        "kill victims that have not left their faulted domain by then; 0: never",
        unit="s",
        low=0,
        high=86400,
    )
    exclusive_drain_s: float = _key(
        5.0,
        "compute mode EXCLUSIVE_PROCESS only: how long a faulted domain may take to empty in place",
        unit="s",
        low=0.1,
        high=3600,
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """[limits]: settings of the stock control daemon, applied to each domain whenever one starts."""

    active_thread_percentage: float | None = _key(
        None, "default share of the GPU's SMs for a client", unit="%", low=0.01, high=100
    )
    client_priority: int | None = _key(None, "default priority: 0 normal, 1 below normal", low=0, high=1)
    pinned_device_memory: Mapping[str, str] = _key(
        MappingProxyType({}),
        'device memory a client may use, by GPU (ordinal or UUID): { "0" = "1G" }',
        unit="M or G",
        pattern=r"[1-9][0-9]*[MG]",
    )
    clients: int = _key(
        60, "clients that one domain is expected to take; `status` warns from there on", low=1, high=1024
    )


@dataclass(frozen=True, slots=True)
class EvictionSettings:
    """[eviction]: how a client is put out."""

    terminate_deadline_ms: int = _key(
        0,
        "how long terminate_client may take before SIGKILL; 0: the backend's own",
        unit="ms",
        low=0,
        high=10000,
    )


@dataclass(frozen=True, slots=True)
class Lease:
    """[lease]: what is held for a dead client while its work runs on."""

    linger_limit_s: float = _key(
        30.0,
        "a dead client's kernel that still runs after this is called endless "
        "(what was only queued, the driver drops after 2 s: keep it above 4)",
        unit="s",
        low=0.1,
        high=86400,
    )
    probe_interval_ms: int = _key(
        10, "how often a dead client's work is checked for its end", unit="ms", low=1, high=10000
    )


@dataclass(frozen=True, slots=True)
class Guard:
    """[guard]: sparse ranges around a client. Silent: what they absorb is nobody's record.

    The keys that begin with zone are of the zones that a program under mpsd-run lays itself around its
    memory, which report; they need [vault] enabled.
    """

    low: GuardSetting = _key(GuardSetting.AUTO, "the range from 64 KiB up to 8 GiB")
    file: GuardSetting = _key(GuardSetting.AUTO, "file-backed mappings of programs and libraries")
    heap: GuardSetting = _key(GuardSetting.AUTO, "the brk heap; breaks cudaHostRegister there")
    stack: GuardSetting = _key(GuardSetting.AUTO, "the main thread's stack")
    max_ranges: int = _key(1024, "ranges laid around one client", low=0, high=65536)
    follow_interval_s: float = _key(
        1.0, "how often the ranges follow the client's mappings", unit="s", low=0.05, high=1
    )
    zone_policy: ZonePolicy = _key(
        ZonePolicy.EVICT,
        "a client that hits a guard zone: evict it, absorb (report only), or freeze it for inspection",
    )
    zones_bytes_per_gpu: int = _key(
        256 << 30,
        "address space that zones of all clients of a GPU may cover; memory only where they are hit",
        unit="bytes",
        low=0,
        high=1 << 46,
    )
    zones_bytes_per_client: int = _key(
        32 << 30,
        "address space that zones of one client may cover, far ones too",
        unit="bytes",
        low=0,
        high=1 << 46,
    )
    zones_per_client: int = _key(
        4096, "zones of one client; each is a mapping of its (vm.max_map_count)", low=0, high=8192
    )


@dataclass(frozen=True, slots=True)
class Kernel:
    """[kernel]: the kernel part (kmod_patches), where nvidia-uvm is the patched one."""

    isolation: IsolationMode = _key(
        IsolationMode.ISOLATE,
        "isolate: a memory fault ends its client alone; report: it is recorded, the driver answers; off",
    )


@dataclass(frozen=True, slots=True)
class JournalSettings:
    """[journal]: fault records, kept under state_dir."""

    max_records: int = _key(1000, "fault records kept", low=1, high=1000000)
    max_bytes: int = _key(16 << 20, "size of the journal on disk", unit="bytes", low=65536, high=1 << 32)
    evidence_window_s: float = _key(
        2.0, "signals this close together are one fault", unit="s", low=0.05, high=60
    )


@dataclass(frozen=True, slots=True)
class Store:
    """[store]: where descriptors are held besides mpsd, so that they outlive it."""

    kind: StoreKind = _key(
        StoreKind.AUTO, "systemd's descriptor store, a keeper process, or auto: systemd where it offers one"
    )
    max_descriptors: int = _key(4096, "descriptors that a keeper holds at most", low=16, high=65536)


@dataclass(frozen=True, slots=True)
class VaultSettings:
    """[vault]: GPU memory of programs under mpsd-run, held so that it can outlive them."""

    enabled: bool = _key(
        False, "offer the vault to programs under mpsd-run; young: README says what was seen on a GPU"
    )
    client_bytes: int = _key(1 << 40, "held of one program", unit="bytes", low=0, high=1 << 50)
    client_descriptors: int = _key(1024, "pieces held of one program", low=0, high=65536)
    user_bytes: int = _key(
        1 << 40, "held of one user's programs, dead ones too", unit="bytes", low=0, high=1 << 50
    )
    user_descriptors: int = _key(1536, "pieces held of one user's programs, dead ones too", low=0, high=65536)
    kept_bytes: int = _key(
        64 << 30, "kept of one owner's dead programs, oldest out first", unit="bytes", low=0, high=1 << 50
    )
    kept_descriptors: int = _key(
        512, "pieces kept of one owner's dead programs, oldest out first", low=0, high=65536
    )
    descriptors: int = _key(
        2048, "pieces held in all; leases need room in the descriptor store too", low=0, high=65536
    )
    keep_age_s: float = _key(
        3600.0, "what a dead program kept is freed after this", unit="s", low=0.1, high=31536000
    )


@dataclass(frozen=True, slots=True)
class FailoverSettings:
    """[failover]: programs under mpsd-run that go on in a second domain when theirs is lost.

    Needs [vault] enabled, for only memory that the vault holds can be carried over.
    """

    enabled: bool = _key(False, "offer it; young: README says what was seen on a GPU")
    mode: FailoverMode = _key(
        FailoverMode.EXACT,
        "the most that a program may have: off, keep (memory; what ran may be half done), exact (done again)",
    )
    lazy: bool = _key(
        False,
        "a program's second context is made in a fail-over only: its memory is saved, and it goes on later",
    )
    per_minute: int = _key(3, "moves of one program within a minute; then it has its error", low=1, high=1000)
    answer_s: float = _key(
        2.0,
        "a program that was told to move and says nothing is recorded as silent",
        unit="s",
        low=0.1,
        high=60,
    )
    linger_s: float = _key(
        60.0,
        "a standby that no program wants is given up after this, unless domains.spare keeps one in any case",
        unit="s",
        low=0.1,
        high=86400,
    )
    evict_offender: bool = _key(
        True, "end the named offender once the others have moved to where its own second context lies"
    )
    free_mib: int = _key(
        512,
        "where a GPU has less free (a fortieth of its memory at most) and somebody there cannot ask for it, "
        "standbys go; 0: they stay",
        unit="MiB",
        low=0,
        high=1 << 20,
    )
    driver: str = _key("", "the libcuda.so.1 to copy for programs; empty: the one that the loader finds")
    copies: str = _key("", "folder of the copies, on a file system that is not noexec; empty: RUN_DIR/copies")


@dataclass(frozen=True, slots=True)
class Log:
    """[log]: mpsd's own log on stderr, and the size of the logs of control daemons and servers."""

    format: LogFormat = _key(LogFormat.AUTO, "json lines or console; auto: console on a terminal")
    level: LogLevel = _key(LogLevel.INFO, "least important lines that are written")
    max_bytes: int = _key(
        16 << 20, "size of each log file of a control daemon or server", unit="bytes", low=65536, high=1 << 32
    )


@dataclass(frozen=True, slots=True)
class Config:
    """Everything the operator can choose."""

    schema_version: int = _key(SCHEMA_VERSION, "version of this schema", low=1, high=SCHEMA_VERSION)
    backend: BackendName = _key(BackendName.NVIDIA, "nvidia, or simulated: a whole daemon without a GPU")
    run_dir: str = _key(
        "", "sockets and domains; empty: /run/mpsd, for other users $XDG_RUNTIME_DIR/mpsd or /tmp/mpsd-UID"
    )
    log_dir: str = _key(
        "", "logs of control daemons; empty: /var/log/mpsd, for others $XDG_STATE_HOME/mpsd/log"
    )
    state_dir: str = _key("", "fault journal; empty: /var/lib/mpsd, for other users $XDG_STATE_HOME/mpsd")
    group: str = _key("mpsd", "members may change things and see every user's events")
    simulated: Simulated = field(default_factory=Simulated)
    domains: Domains = field(default_factory=Domains)
    limits: Limits = field(default_factory=Limits)
    eviction: EvictionSettings = field(default_factory=EvictionSettings)
    lease: Lease = field(default_factory=Lease)
    guard: Guard = field(default_factory=Guard)
    kernel: Kernel = field(default_factory=Kernel)
    journal: JournalSettings = field(default_factory=JournalSettings)
    store: Store = field(default_factory=Store)
    vault: VaultSettings = field(default_factory=VaultSettings)
    failover: FailoverSettings = field(default_factory=FailoverSettings)
    log: Log = field(default_factory=Log)


def default_directories(uid: int, environ: Mapping[str, str]) -> dict[str, str]:
    """run_dir, log_dir and state_dir for this user where the configuration names none."""
    if uid == 0:
        return {"run_dir": "/run/mpsd", "log_dir": "/var/log/mpsd", "state_dir": "/var/lib/mpsd"}
    runtime = environ.get("XDG_RUNTIME_DIR")
    home = environ.get("HOME", "/")
    state = environ.get("XDG_STATE_HOME") or f"{home}/.local/state"
    return {
        "run_dir": f"{runtime}/mpsd" if runtime else f"/tmp/mpsd-{uid}",
        "log_dir": f"{state}/mpsd/log",
        "state_dir": f"{state}/mpsd",
    }


def check_socket_path(path: str | os.PathLike[str], key: str = "run_dir") -> str:
    """The path as text, or ConfigError, naming the key, when a Unix socket cannot be bound to it."""
    text = os.fspath(path)
    size = len(os.fsencode(text))
    if size > SOCKET_PATH_LIMIT:
        raise ConfigError(
            f"socket path {text!r} has {size} bytes; a Unix socket takes {SOCKET_PATH_LIMIT}",
            remedy=f"choose a {key} that is {size - SOCKET_PATH_LIMIT} bytes shorter",
        )
    return text


def check_rules(config: Config, where: str, uid: int, node: str = "") -> None:
    """What no single key can say, for an mpsd that this user runs. Raises ConfigError.

    `node`: where the simulated GPU would be, if that is known; empty otherwise.
    """
    for key in ("run_dir", "log_dir", "state_dir"):
        value = getattr(config, key)
        if not os.path.isabs(value):
            raise ConfigError(f"{where}: {key} = {value!r} is not an absolute path", remedy="start it with /")
    longest = len(os.fsencode(f"{config.run_dir}/{LONGEST_IN_RUN_DIR}"))
    if longest > SOCKET_PATH_LIMIT:
        raise ConfigError(
            f"{where}: run_dir {config.run_dir!r} is too long: a socket path may have {SOCKET_PATH_LIMIT} "
            f"bytes, and the longest below it would have {longest}",
            remedy=f"choose a run_dir that is {longest - SOCKET_PATH_LIMIT} bytes shorter",
        )
    check_socket_path(f"{config.domains.default_path}/control", "default_path")
    _check_rights(config, where, uid)
    if config.backend is BackendName.SIMULATED and node:
        _check_node(config, where, node)
    if config.vault.enabled and config.vault.descriptors > config.store.max_descriptors // 2:
        raise ConfigError(
            f"{where}: vault.descriptors is more than half of store.max_descriptors",
            remedy="leases need the other half: raise the one or lower the other",
        )
    if config.failover.enabled and not config.vault.enabled:
        raise ConfigError(
            f"{where}: failover.enabled needs vault.enabled: memory is carried over as the vault takes it",
            remedy="set [vault] enabled = true as well, or [failover] enabled = false",
        )
    for key in ("driver", "copies"):
        value = getattr(config.failover, key)
        if value and not os.path.isabs(value):
            raise ConfigError(
                f"{where}: failover.{key} = {value!r} is not an absolute path", remedy="start it with /"
            )
    seen: set[str] = set()
    for gpu in (gpu for group in config.domains.span for gpu in group):
        if gpu in seen:
            raise ConfigError(
                f"{where}: domains.span names {gpu!r} twice", remedy="a GPU belongs to one domain at a time"
            )
        seen.add(gpu)
    if config.domains.start_retry_max_s < config.domains.start_retry_s:
        raise ConfigError(
            f"{where}: domains.start_retry_max_s is below domains.start_retry_s",
            remedy="the first pause is the shortest: raise the one or lower the other",
        )
    for gpu in config.limits.pinned_device_memory:
        if not re.fullmatch(r"[0-9]+|(GPU|MIG)-[0-9A-Za-z-/]+", gpu):
            raise ConfigError(
                f"{where}: limits.pinned_device_memory names {gpu!r}, which is no GPU",
                remedy='use an ordinal ("0") or a UUID ("GPU-...")',
            )


def _check_rights(config: Config, where: str, uid: int) -> None:
    """Domains of everybody's need servers that change their user."""
    domains = config.domains
    if uid != 0 and (domains.mode is DomainMode.SHARED or domains.serve_default_path):
        key = "mode = shared" if domains.mode is DomainMode.SHARED else "serve_default_path = true"
        raise ConfigError(
            f"{where}: [domains] {key} serves every user, which only an mpsd that root runs can do",
            remedy='run it as root, or set mode = "per-user" and serve_default_path = false',
        )


def _check_node(config: Config, where: str, node: str) -> None:
    """The simulated GPU is a process of its own, with a lock and sockets in a directory of its own."""
    check_socket_path(f"{os.path.abspath(node)}/gpu.sock", "[simulated] dir")
    if os.path.realpath(node) == os.path.realpath(config.run_dir):
        raise ConfigError(
            f"{where}: the simulated GPU's directory {node!r} is run_dir too",
            remedy="set another [simulated] dir (or MPSD_SIM_DIR)",
        )
