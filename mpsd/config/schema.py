"""The configuration schema: meaning, default, unit and range of every key, in one frozen tree.

`Config` is the whole schema. The reader (mpsd.config.reader) walks these dataclasses, so every valid
key is defined here, and `mpsd config show` prints the texts of this module.

Sources of a value, the last one wins: the default below, the file, the environment. The variable of
`[domains] spare` is MPSD_DOMAINS_SPARE; the variable of the top-level `run_dir` is MPSD_RUN_DIR. Its
text is a TOML value, or unquoted text for a text key. The file is $MPSD_CONFIG, else
/etc/mpsd/mpsd.toml, and may be absent.
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

from mpsd.base.errors import ConfigError
from mpsd.base.limits import SOCKET_PATH_LIMIT
from mpsd.base.model import FailoverMode, IsolationMode, ZonePolicy
from mpsd.base.protection import ProtectionLevel, ProtectSetting
from mpsd.base.quantities import mebibytes

SCHEMA_VERSION = 1
# Longest path below run_dir: a control daemon's socket below a slot's stable path (mpsd.config.layout).
SLOT_NAME_BYTES = 24
LONGEST_IN_RUN_DIR = f"s/{'x' * SLOT_NAME_BYTES}/control_privileged"
DEFAULT_FILE = Path("/etc/mpsd/mpsd.toml")


class BackendName(StrEnum):
    NVIDIA = "nvidia"
    SIMULATED = "simulated"


class DomainMode(StrEnum):
    PER_USER = "per-user"
    SHARED = "shared"


class StartSetting(StrEnum):
    FIRST_CLIENT = "first-client"
    AT_ONCE = "at-once"


class GuardSetting(StrEnum):
    """`auto`: on only for a class of ranges that measurements proved safe on this machine."""

    ON = "true"
    OFF = "false"
    AUTO = "auto"


class StoreKind(StrEnum):
    AUTO = "auto"
    SYSTEMD = "systemd"
    KEEPER = "keeper"


class ReplaySetting(StrEnum):
    """The most that a fail-over participant may have. To have none, set `protect` lower."""

    KEEP = FailoverMode.KEEP.value
    EXACT = FailoverMode.EXACT.value


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
    """Return a dataclass field that carries its text, its unit and its inclusive range."""
    metadata = {"doc": doc, "unit": unit, "low": low, "high": high, "pattern": pattern}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Simulated:
    """[simulated]: the simulated GPU, used only with backend = "simulated"."""

    dir: str = _key(
        "",
        "directory of the simulated node; pass it as --dir to `python -m mpsd.gpu.simulated stop` too; "
        "empty: $MPSD_SIM_DIR, else $XDG_RUNTIME_DIR/mpsd-sim or /tmp/mpsd-sim-UID",
    )
    gpus: int = _key(1, "number of GPUs of the simulated node", low=1, high=16)
    isolation: bool = _key(False, "simulate the patched kernel module")


@dataclass(frozen=True, slots=True)
class Domains:
    """[domains]: the fault domains and their deadlines."""

    mode: DomainMode = _key(
        DomainMode.PER_USER,
        "per-user: each user has its own domain; shared: all users of a GPU share one domain",
    )
    private: bool = _key(
        True,
        "admit only its user and root to a user's domain, by an ACL of its pipe directory; a shared domain "
        "admits every user",
    )
    spare: bool = _key(True, "keep a warm standby domain, which takes over when the active domain faults")
    start: StartSetting = _key(
        StartSetting.FIRST_CLIENT,
        "first-client: a slot's server and standby domain start with its first client; at-once: they start "
        "with the slot, and stay",
    )
    idle_s: float = _key(
        300.0,
        "first-client only: time after which the server and the standby domain of a slot without clients end",
        unit="s",
        low=0.1,
        high=86400,
    )
    span: tuple[tuple[str, ...], ...] = _key(
        (), "lists of GPU UUIDs; one domain serves each list, for clients that use several GPUs"
    )
    serve_default_path: bool = _key(False, "also serve default_path, for jobs that set no variable")
    default_path: str = _key(
        "/tmp/nvidia-mps", "pipe directory that libcuda uses without CUDA_MPS_PIPE_DIRECTORY"
    )
    start_deadline_s: float = _key(
        20.0, "time limit for the start of a control daemon and its server", unit="s", low=1, high=600
    )
    stop_deadline_s: float = _key(
        5.0, "time limit for a control daemon to quit; then mpsd kills it", unit="s", low=0.1, high=600
    )
    start_retry_s: float = _key(
        1.0, "first pause after a failed start; each further failure doubles it", unit="s", low=0.1, high=600
    )
    start_retry_max_s: float = _key(
        60.0, "longest pause between two attempts to start a domain", unit="s", low=1, high=3600
    )
    laggard_report_s: float = _key(
        10.0,
        "report a victim that has not left its faulted domain after this time",
        unit="s",
        low=0.1,
        high=3600,
    )
    kill_victims_after_s: float = _key(
        0.0,
        "kill victims that have not left their faulted domain after this time; 0: never",
        unit="s",
        low=0,
        high=86400,
    )
    exclusive_drain_s: float = _key(
        5.0,
        "compute mode EXCLUSIVE_PROCESS only: time limit for a faulted domain to empty in place",
        unit="s",
        low=0.1,
        high=3600,
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """[limits]: settings of the stock control daemon, applied to every domain."""

    active_thread_percentage: float | None = _key(
        None, "share of the GPU's SMs for each client, a number such as 50", unit="%", low=0.01, high=100
    )
    client_priority: int | None = _key(
        None, "default priority of clients: 0 normal, 1 below normal", low=0, high=1
    )
    pinned_device_memory: Mapping[str, str] = _key(
        MappingProxyType({}),
        "device memory limit of each client, by GPU: its UUID, or the index that nvidia-smi shows: "
        '{ "GPU-..." = "2G", "0" = "1.5G" }',
        unit="M or G",
        pattern=r"[0-9]{1,8}(\.[0-9]{1,6})?[MGmg]",
    )
    clients: int = _key(
        48,
        "clients of one domain; with so many, new clients go to the next domain. A server takes about 48",
        low=1,
        high=1024,
    )


@dataclass(frozen=True, slots=True)
class EvictionSettings:
    """[eviction]: how mpsd evicts a client."""

    terminate_deadline_ms: int = _key(
        0,
        "time limit of terminate_client before SIGKILL; 0: the backend's default",
        unit="ms",
        low=0,
        high=10000,
    )


@dataclass(frozen=True, slots=True)
class Lease:
    """[lease]: GPU memory that mpsd holds for an exited client until its kernels have ended."""

    linger_limit_s: float = _key(
        30.0,
        "an exited client's kernel that still runs after this time counts as endless; keep it above 4, "
        "because the driver drops queued work only after 2 s",
        unit="s",
        low=0.1,
        high=86400,
    )


@dataclass(frozen=True, slots=True)
class Guard:
    """[guard]: the outer guard, sparse ranges that mpsd lays around a client. They absorb in silence.

    Keys that begin with zone concern guard zones: a program under mpsd-run lays them around its own memory
    and they report hits. They need the level guard.
    """

    low: GuardSetting = _key(
        GuardSetting.AUTO,
        "outer guard over addresses from 64 KiB to 8 GiB; it absorbs stray accesses in silence",
    )
    file: GuardSetting = _key(
        GuardSetting.AUTO, "outer guard over file-backed mappings of programs and libraries"
    )
    heap: GuardSetting = _key(
        GuardSetting.AUTO, "outer guard over the brk heap; breaks cudaHostRegister there"
    )
    stack: GuardSetting = _key(GuardSetting.AUTO, "outer guard over the main thread's stack")
    max_ranges: int = _key(1024, "limit of outer guard ranges of one client", low=0, high=65536)
    zone_policy: ZonePolicy = _key(
        ZonePolicy.EVICT,
        "consequence of a guard hit for the client: evict, absorb (record only), or freeze for inspection",
    )
    zones_bytes_per_gpu: int = _key(
        64 << 30,
        "limit of address space under zones of all clients of a GPU; only a hit takes memory",
        unit="bytes",
        low=0,
        high=1 << 46,
    )
    zones_bytes_per_client: int = _key(
        16 << 30,
        "limit of address space under zones of one client, with far zones",
        unit="bytes",
        low=0,
        high=1 << 46,
    )
    zones_per_client: int = _key(
        4096,
        "limit of zones of one client; each zone is a mapping of the client (vm.max_map_count)",
        low=0,
        high=8192,
    )


@dataclass(frozen=True, slots=True)
class Kernel:
    """[kernel]: the patched nvidia-uvm (kmod_patches), if it is loaded."""

    isolation: IsolationMode = _key(
        IsolationMode.ISOLATE,
        "mode of the patched nvidia-uvm. isolate: a memory fault ends only its client; report: the fault is "
        "recorded and handled as by the stock driver; off: as the stock driver",
    )


@dataclass(frozen=True, slots=True)
class JournalSettings:
    """[journal]: fault records, kept under state_dir."""

    max_records: int = _key(1000, "limit of fault records", low=1, high=1000000)
    max_bytes: int = _key(
        16 << 20, "limit of the journal's size on disk", unit="bytes", low=65536, high=1 << 32
    )


@dataclass(frozen=True, slots=True)
class Store:
    """[store]: the descriptor store, a second holder of descriptors, so that they outlive mpsd."""

    kind: StoreKind = _key(
        StoreKind.AUTO,
        "systemd: its descriptor store; keeper: a keeper process; auto: systemd if it offers one",
    )
    max_descriptors: int = _key(4096, "limit of descriptors in the keeper process", low=16, high=65536)


@dataclass(frozen=True, slots=True)
class VaultSettings:
    """[vault]: GPU memory of programs under mpsd-run that the daemon holds too; it can outlive them.

    Level guard and above.
    """

    client_bytes: int = _key(
        1 << 40, "limit of memory held for one program", unit="bytes", low=0, high=1 << 50
    )
    client_descriptors: int = _key(1024, "limit of segments held for one program", low=0, high=65536)
    user_bytes: int = _key(
        1 << 40,
        "limit of memory held for one user's programs, exited ones too",
        unit="bytes",
        low=0,
        high=1 << 50,
    )
    user_descriptors: int = _key(
        1536, "limit of segments held for one user's programs, exited ones too", low=0, high=65536
    )
    kept_bytes: int = _key(
        64 << 30,
        "limit of memory kept for one owner's exited programs; the oldest is freed first",
        unit="bytes",
        low=0,
        high=1 << 50,
    )
    kept_descriptors: int = _key(
        512,
        "limit of segments kept for one owner's exited programs; the oldest is freed first",
        low=0,
        high=65536,
    )
    descriptors: int = _key(
        2048,
        "limit of segments held in all; leases need the same store, so the default is at most half of it",
        low=0,
        high=65536,
    )
    keep_age_s: float = _key(
        3600.0, "age at which kept memory of an exited program is freed", unit="s", low=0.1, high=31536000
    )


@dataclass(frozen=True, slots=True)
class FailoverSettings:
    """[failover]: programs under mpsd-run that continue in a standby domain when their domain faults.

    Level failover alone.
    """

    mode: ReplaySetting = _key(
        ReplaySetting.EXACT,
        "the most that a program may have. exact: memory is rolled back and work in flight is replayed; "
        "keep: memory is kept and work in flight may be half done, so programs are not protected by it",
    )
    lazy: bool = _key(
        False,
        "make standby contexts only during a move: saves GPU memory, and programs pause longer",
    )
    standby_contexts: int = _key(
        12,
        "limit of standby contexts on one GPU; programs beyond it stay at guard. Each one lengthens the time "
        "for which the GPU stands still at an SM exception",
        low=1,
        high=64,
    )
    per_minute: int = _key(
        3,
        "limit of moves of one program within a minute; beyond it the program meets the fault's error",
        low=1,
        high=1000,
    )
    answer_s: float = _key(
        2.0,
        "time after which a program that does not answer an order to move is recorded as silent",
        unit="s",
        low=0.1,
        high=60,
    )
    linger_s: float = _key(
        60.0,
        "time after which a standby domain without participants ends, if domains.spare is false",
        unit="s",
        low=0.1,
        high=86400,
    )
    evict_offender: bool = _key(
        True,
        "end the named offender after the other programs have moved: its standby context is where they are",
    )
    free_mib: int = _key(
        512,
        "release standby contexts when free GPU memory drops below this (at most a fortieth of the GPU's "
        "memory) and a client without the proxy is running; 0 disables this",
        unit="MiB",
        low=0,
        high=1 << 20,
    )
    driver: str = _key("", "the libcuda.so.1 to copy into driver files for programs; empty: the loader's")
    copies: str = _key(
        "",
        "folder of the driver files, open to users, on a file system without noexec; empty: RUN_DIR/copies, "
        "or a folder in /var/cache/mpsd if /run is mounted noexec",
    )


@dataclass(frozen=True, slots=True)
class Log:
    """[log]: mpsd's own log on stderr, and the size of control daemons' and servers' logs."""

    format: LogFormat = _key(
        LogFormat.AUTO,
        "json: a JSON object per line; console: plain lines; auto: console on a terminal, else json",
    )
    level: LogLevel = _key(LogLevel.INFO, "lowest level that is logged")
    max_bytes: int = _key(
        16 << 20,
        "limit of each log file of a control daemon or server",
        unit="bytes",
        low=65536,
        high=1 << 32,
    )


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration."""

    schema_version: int = _key(SCHEMA_VERSION, "version of this schema", low=1, high=SCHEMA_VERSION)
    backend: BackendName = _key(
        BackendName.NVIDIA, "nvidia; simulated: a simulated GPU, for trials without hardware"
    )
    run_dir: str = _key(
        "",
        "directory of sockets and domains; empty: /run/mpsd for root, else $XDG_RUNTIME_DIR/mpsd or "
        "/tmp/mpsd-UID",
    )
    log_dir: str = _key(
        "", "directory of control daemons' logs; empty: /var/log/mpsd for root, else $XDG_STATE_HOME/mpsd/log"
    )
    state_dir: str = _key(
        "", "directory of the fault journal; empty: /var/lib/mpsd for root, else $XDG_STATE_HOME/mpsd"
    )
    group: str = _key(
        "mpsd", "Unix group of administrators: its users may change everything and see every user's events"
    )
    protect: ProtectSetting = _key(
        ProtectSetting.AUTO,
        "protection level of the programs. observe: the daemon alone; guard: and guard zones; failover: and "
        "standby contexts; auto: as proven for this driver and GPU (mpsd help protection)",
    )
    users: Mapping[str, ProtectionLevel] = _key(
        MappingProxyType({}),
        'lower levels for users, by name or uid: { alice = "guard", 1007 = "observe" }',
    )
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
    """Return the default run_dir, log_dir and state_dir of a user."""
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
    """Return the path as text. Raise ConfigError, with the key, if it is too long for a Unix socket."""
    text = os.fspath(path)
    size = len(os.fsencode(text))
    if size > SOCKET_PATH_LIMIT:
        raise ConfigError(
            f"socket path {text!r} has {size} bytes; a Unix socket takes {SOCKET_PATH_LIMIT}",
            remedy=f"choose a {key} that is {size - SOCKET_PATH_LIMIT} bytes shorter",
        )
    return text


def check_rules(config: Config, where: str, uid: int, node: str = "") -> None:
    """Check rules that concern several keys, for an mpsd that user `uid` runs. Raise ConfigError.

    `where`: the sources of the configuration, for errors. `node`: directory of the simulated GPU; empty if
    unknown.
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
    vault = config.protect.limit is not ProtectionLevel.OBSERVE
    chosen = config.vault.descriptors
    # The default adapts to the store.
    if vault and chosen != VaultSettings().descriptors and chosen > config.store.max_descriptors // 2:
        raise ConfigError(
            f"{where}: vault.descriptors is more than half of store.max_descriptors",
            remedy="leases need the other half: lower vault.descriptors or raise store.max_descriptors",
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
            remedy="raise domains.start_retry_max_s or lower domains.start_retry_s",
        )
    for gpu in config.limits.pinned_device_memory:
        if not re.fullmatch(r"[0-9]+|(GPU|MIG)-[0-9A-Za-z-/]+", gpu):
            raise ConfigError(
                f"{where}: limits.pinned_device_memory names {gpu!r}, which is not a GPU",
                remedy='use the UUID ("GPU-...") or the index that nvidia-smi shows ("0")',
            )
        size = config.limits.pinned_device_memory[gpu]
        if not _is_whole(size):
            raise ConfigError(
                f"{where}: limits.pinned_device_memory of {gpu} = {size!r} is not a whole number of MiB",
                remedy='write a multiple of one MiB, for example "1536M"',
            )


def _is_whole(size: str) -> bool:
    """Return whether a size is a whole number of MiB above 0."""
    try:
        return mebibytes(size) > 0
    except ValueError:
        return False


def _check_rights(config: Config, where: str, uid: int) -> None:
    """Check that root runs an mpsd that serves every user: its servers change their user."""
    domains = config.domains
    if uid != 0 and (domains.mode is DomainMode.SHARED or domains.serve_default_path):
        key = "mode = shared" if domains.mode is DomainMode.SHARED else "serve_default_path = true"
        raise ConfigError(
            f"{where}: [domains] {key} serves every user, and needs an mpsd that root runs",
            remedy='run mpsd as root, or set mode = "per-user" and serve_default_path = false',
        )


def _check_node(config: Config, where: str, node: str) -> None:
    """Check the simulated GPU's directory: the process has a lock and sockets there, apart from mpsd's."""
    check_socket_path(f"{os.path.abspath(node)}/gpu.sock", "[simulated] dir")
    if os.path.realpath(node) == os.path.realpath(config.run_dir):
        raise ConfigError(
            f"{where}: the simulated GPU's directory {node!r} is run_dir too",
            remedy="set another [simulated] dir (or MPSD_SIM_DIR)",
        )
