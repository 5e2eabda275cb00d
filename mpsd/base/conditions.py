"""Conditions: the closed list of states that degrade protection or need an operator.

A condition has a code, a text and a remedy. Status, doctor, events, metrics and mpsd-run show the same
entry. A producer returns `Condition` values; it never invents a text that has no code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any


class Code(StrEnum):
    """The codes. A code never changes its meaning and is never used again for another condition."""

    GPU_LOST = "gpu-lost"
    GPU_DRAINED = "gpu-drained"
    GPU_ABSENT = "gpu-absent"
    MEMORY_NOT_READ = "memory-not-read"
    MODE_NOT_READ = "mode-not-read"
    DOMAIN_FAULTED = "domain-faulted"
    DOMAIN_UNREACHABLE = "domain-unreachable"
    DOMAIN_NOT_SERVING = "domain-not-serving"
    DOMAIN_CUT_OFF = "domain-cut-off"
    DOMAIN_UNSUPERVISED = "domain-unsupervised"
    DOMAINS_OPEN = "domains-open"
    NO_DOMAIN = "no-domain"
    STARTS_DELAYED = "starts-delayed"
    CLIENTS_LOST = "clients-lost"
    CLIENTS_UNPROTECTED = "clients-unprotected"
    CLIENTS_LIMITED = "clients-limited"
    CLIENTS_WAITING = "clients-waiting"
    CLIENTS_NOT_SHOWN = "clients-not-shown"
    SNAPSHOT_BUDGET = "snapshot-budget"
    STANDBY_CAP = "standby-cap"
    MEMORY_HELD = "memory-held"
    PROTECTION_LOWERED = "protection-lowered"
    LIMITS_NOT_APPLIED = "limits-not-applied"
    BAD_THREAD_PERCENTAGE = "bad-thread-percentage"
    CLIENT_THREAD_PERCENTAGE = "client-thread-percentage"
    USER_UNKNOWN = "user-unknown"
    GUARD_SILENT = "guard-silent"
    KERNEL_ISOLATION = "kernel-isolation"
    XIDS_NOT_SEEN = "xids-not-seen"
    KERNEL_LOG_NOT_READ = "kernel-log-not-read"
    SIGNS_LOST = "signs-lost"
    LOG_QUIET = "log-quiet"
    LOG_FLOODED = "log-flooded"
    LOG_DISK_FULL = "log-disk-full"
    STORE_LOST = "store-lost"
    STORE_NOT_WATCHED = "store-not-watched"
    LEASES_NOT_STORED = "leases-not-stored"
    LEASES_OVER_SHARE = "leases-over-share"
    LEASES_LEFT_STORED = "leases-left-stored"
    LEASES_HELD = "leases-held"
    SETS_HELD = "sets-held"
    SEGMENTS_NOT_NOTED = "segments-not-noted"
    SEGMENTS_NOT_STORED = "segments-not-stored"
    FILE_NOT_KEPT = "file-not-kept"
    PATH_NOT_SWITCHED = "path-not-switched"
    PATHS_NOT_TRIED = "paths-not-tried"
    NO_RESERVE = "no-reserve"
    DEFAULT_PATH = "default-path"
    SOCKET_REMOVED = "socket-removed"
    DECISION_DROPPED = "decision-dropped"


@dataclass(frozen=True, slots=True)
class Kind:
    """`text` and `remedy` take the fields {subject}, {detail} and {count}. `degrades`: status exits 10."""

    text: str
    remedy: str
    degrades: bool = True
    refuses: bool = False
    """Whether a client must not join where the condition holds."""


_DESCRIPTORS = "raise LimitNOFILE of mpsd's unit, then restart mpsd"
_STORE = "free descriptors or raise [store] max_descriptors; keep mpsd running until then"
_READ_LOG = "read mpsd's log (journalctl -u mpsd)"

KINDS: Mapping[Code, Kind] = MappingProxyType(
    {
        Code.GPU_LOST: Kind(
            "{subject} does not work any more ({detail})",
            "move its programs to another GPU, reset the GPU or restart the machine, then restart mpsd",
            refuses=True,
        ),
        Code.GPU_DRAINED: Kind(
            "{subject} is drained",
            "run mpsd-ctl undrain --gpu {subject} when it may be used again, or name another GPU",
            degrades=False,
            refuses=True,
        ),
        Code.GPU_ABSENT: Kind(
            "the configuration names {subject}, which this machine lacks: {detail}",
            "correct the file and restart mpsd, or find out why the GPU is missing (mpsd-ctl status)",
        ),
        Code.MEMORY_NOT_READ: Kind(
            "mpsd cannot read the free memory of {subject}, so standby contexts stay: {detail}",
            "read the kernel log, and check the driver with nvidia-smi",
        ),
        Code.MODE_NOT_READ: Kind(
            "mpsd cannot read the compute mode of {subject} and takes it for DEFAULT: {detail}",
            "read the kernel log, and check the driver with nvidia-smi",
        ),
        Code.DOMAIN_FAULTED: Kind(
            "domain {subject} faulted, and no other domain has taken over; it has {count} client(s)",
            "restart its clients (mpsd-ctl status), and read mpsd-ctl faults",
        ),
        Code.DOMAIN_UNREACHABLE: Kind(
            "no new client reaches domain {subject}, which has {count} client(s): {detail}",
            "run mpsd-ctl doctor: it names the directory and the command",
        ),
        Code.DOMAIN_NOT_SERVING: Kind(
            "domain {subject} is {detail} and takes no new clients, and no other domain has taken over",
            "end its clients (mpsd-ctl status), and read mpsd-ctl faults",
        ),
        Code.DOMAIN_CUT_OFF: Kind(
            "domain {subject} takes no new clients: {detail}; its clients run on until they end",
            "keep other programs away from run_dir; new clients use another domain",
        ),
        Code.DOMAIN_UNSUPERVISED: Kind(
            "domain {subject} of an earlier mpsd is not supervised any more: process {count} serves it",
            "once its clients have ended, run echo quit | CUDA_MPS_PIPE_DIRECTORY={detail} "
            "nvidia-cuda-mps-control",
        ),
        Code.DOMAINS_OPEN: Kind(
            "run_dir {subject} is {detail}",
            "mount it on tmpfs or ext4",
        ),
        Code.NO_DOMAIN: Kind(
            "no domain starts for {subject}: {detail}",
            "run mpsd-ctl doctor; mpsd tries again by itself",
        ),
        Code.STARTS_DELAYED: Kind(
            "{count} domains of {subject} were started within a minute: mpsd delays the next one",
            "read mpsd-ctl faults, and stop the program that faults again and again",
        ),
        Code.CLIENTS_LOST: Kind(
            "{count} client(s) of domain {subject} lost their GPU work and still run",
            "restart these clients (mpsd-ctl status lists them)",
        ),
        Code.CLIENTS_UNPROTECTED: Kind(
            "{count} client(s) of domain {subject} have no lease: their death can harm the other clients",
            "read the reason in mpsd-ctl status, then restart these clients",
        ),
        Code.CLIENTS_LIMITED: Kind(
            "{count} client(s) of domain {subject} have a lease without all of its protections",
            "read the reason in mpsd-ctl status, then restart these clients",
        ),
        Code.CLIENTS_WAITING: Kind(
            "{count} client(s) have no lease: no descriptor left",
            _DESCRIPTORS,
        ),
        Code.CLIENTS_NOT_SHOWN: Kind(
            "{count} client(s) are not shown: no descriptor left",
            _DESCRIPTORS,
        ),
        Code.SNAPSHOT_BUDGET: Kind(
            "{count} client(s) of domain {subject} have left fail-over: saving exceeds a budget ({detail})",
            "read the reason in mpsd-ctl status; a list of read-only memory can help (mpsd help failover)",
            degrades=False,
        ),
        Code.STANDBY_CAP: Kind(
            "{count} client(s) wait for fail-over: {subject} has its limit of {detail} standby contexts",
            "raise [failover] standby_contexts if a longer stall is acceptable (mpsd-ctl doctor shows it)",
            degrades=False,
        ),
        Code.MEMORY_HELD: Kind(
            "{count} exited client(s) of domain {subject} hold GPU memory: their kernels do not end",
            "end the other clients of this domain: mpsd frees the memory after the last one",
            degrades=False,
        ),
        Code.PROTECTION_LOWERED: Kind(
            "the protection level of {subject} is {detail}",
            "mpsd-ctl doctor shows the remedy; or set protect to the level that is left",
        ),
        Code.LIMITS_NOT_APPLIED: Kind(
            "limits of domain {subject} are not applied: {detail}",
            "set a value that the control daemon takes (mpsd help shares)",
        ),
        Code.BAD_THREAD_PERCENTAGE: Kind(
            "cuBLAS computes wrong results for clients of domain {subject}, without an error: {detail}",
            "set one of the right percentages (mpsd help shares), and start the programs again",
        ),
        Code.CLIENT_THREAD_PERCENTAGE: Kind(
            "cuBLAS computes wrong results for a client of domain {subject}, without an error: {detail}",
            "set one of the right percentages (mpsd help shares) for that program, and start it again",
            degrades=False,
        ),
        Code.USER_UNKNOWN: Kind(
            "[users] names {subject}, which is no user of this machine",
            "correct the file and restart mpsd",
        ),
        Code.GUARD_SILENT: Kind(
            "outer guard is silent: mpsd records no access that it absorbs ({subject})",
            "no action: it is normal, and guard zones record each access (mpsd help guards)",
            degrades=False,
        ),
        Code.KERNEL_ISOLATION: Kind(
            "kernel isolation: {detail}",
            "restart mpsd to set the configured mode ([kernel] isolation)",
        ),
        Code.XIDS_NOT_SEEN: Kind(
            "mpsd does not see Xids: {detail}",
            "check the driver with nvidia-smi, then restart mpsd",
        ),
        Code.KERNEL_LOG_NOT_READ: Kind(
            "mpsd cannot read the kernel log: SM exceptions stay unclassified",
            "run mpsd as root (CAP_SYSLOG); in a container, pass /dev/kmsg in",
        ),
        Code.SIGNS_LOST: Kind(
            "mpsd lost a source of fault signs: {detail}",
            "restart mpsd",
        ),
        Code.LOG_QUIET: Kind(
            "the log of domain {subject} is quiet: {detail}; mpsd lists its clients each second and names no "
            "lone suspect",
            "end all its clients together, and mpsd replaces it (not in compute mode EXCLUSIVE_PROCESS)",
        ),
        Code.LOG_FLOODED: Kind(
            "the log of domain {subject} is flooded: {count} KiB skipped; mpsd asks its server for clients "
            "each second",
            "end the program that writes it",
        ),
        Code.LOG_DISK_FULL: Kind(
            "{subject} is full (less than {count} KiB left): mpsd notices clients only once a second, and "
            "faults lack evidence",
            "make space there",
        ),
        Code.STORE_LOST: Kind(
            "leases end with mpsd: {detail}",
            f"{_READ_LOG}; mpsd starts another descriptor store by itself",
        ),
        Code.STORE_NOT_WATCHED: Kind(
            "cannot watch the descriptor store: {detail}",
            _DESCRIPTORS,
        ),
        Code.LEASES_NOT_STORED: Kind(
            "{count} lease(s) are not in the descriptor store and end with mpsd: {detail}",
            _STORE,
        ),
        Code.LEASES_OVER_SHARE: Kind(
            "{count} lease(s) exceed their user's share of the descriptor store ({detail} descriptors) and "
            "end with mpsd",
            "end programs of that user, or raise [store] max_descriptors",
        ),
        Code.LEASES_LEFT_STORED: Kind(
            "{count} released lease(s) are still in the descriptor store: {detail}",
            f"{_READ_LOG}; mpsd tries again by itself",
        ),
        Code.LEASES_HELD: Kind(
            "{count} lease(s) of domains {subject} of an earlier mpsd are held until their work or those "
            "domains end",
            "end the clients of these domains",
        ),
        Code.SETS_HELD: Kind(
            "{count} set(s) in the descriptor store do not parse and are held",
            "run the version of mpsd that stored them, or end the domains of that version",
        ),
        Code.SEGMENTS_NOT_NOTED: Kind(
            "{count} segment(s) of the vault are not noted: {detail}; they end with mpsd",
            _DESCRIPTORS,
        ),
        Code.SEGMENTS_NOT_STORED: Kind(
            "{count} segment(s) of the vault are not stored: {detail}; they end with mpsd",
            _STORE,
        ),
        Code.FILE_NOT_KEPT: Kind(
            "a file of mpsd is incomplete: {detail}",
            "make space there, check the owner and mode of the file, and move a damaged file away",
        ),
        Code.PATH_NOT_SWITCHED: Kind(
            "the path of slot {subject} does not lead to {detail}",
            "make space in run_dir; mpsd must be able to write there",
        ),
        Code.PATHS_NOT_TRIED: Kind(
            "paths are checked with the rights of mpsd, not of their users: {detail}",
            "give mpsd CAP_SETUID and CAP_SETGID",
        ),
        Code.NO_RESERVE: Kind(
            "after a fault new clients may not reach the standby domain: {detail}",
            "free disk space in run_dir",
        ),
        Code.DEFAULT_PATH: Kind(
            "programs that set nothing do not join: {detail}",
            "stop the other control daemon, and remove the path; mpsd tries again by itself",
        ),
        Code.SOCKET_REMOVED: Kind(
            "programs do not reach a socket of mpsd: {detail}",
            "keep other programs away from run_dir; mpsd tries again each second",
        ),
        Code.DECISION_DROPPED: Kind(
            "mpsd dropped {count} decision(s) after an error of its own",
            "report it with mpsd's log (journalctl -u mpsd), then restart mpsd",
        ),
    }
)


@dataclass(frozen=True, slots=True, order=True)
class Condition:
    """A condition that holds now.

    `subject`: the UUID of a GPU ("GPU-..."), or the name of a slot, domain, client or file. `detail`: a
    cause. `count`: a number for the text. Code and subject identify a condition: detail and count may change
    while it holds.
    """

    code: Code
    subject: str = ""
    detail: str = ""
    count: int = 0

    @property
    def key(self) -> tuple[Code, str]:
        return self.code, self.subject

    @property
    def kind(self) -> Kind:
        return KINDS[self.code]

    @property
    def text(self) -> str:
        return self._filled(self.kind.text)

    @property
    def remedy(self) -> str:
        return self._filled(self.kind.remedy)

    def _filled(self, text: str) -> str:
        return text.format(subject=self.subject, detail=self.detail, count=self.count)

    def view(self) -> dict[str, object]:
        """Return the row of `status --json`."""
        return {
            "code": self.code.value,
            "subject": self.subject,
            "text": self.text,
            "remedy": self.remedy,
            "degrades": self.kind.degrades,
        }


def refusing(conditions: Iterable[Condition]) -> Condition | None:
    """Return a condition that forbids new clients, or None."""
    return next((found for found in conditions if found.kind.refuses), None)


_EARLIER_SILENT = "outer guard is silent"


def degrading_texts(status: Mapping[str, Any]) -> list[str]:
    """Return the texts of the conditions that degrade a status.

    An earlier mpsd sends texts alone. One of them does not degrade: a silent outer guard is normal there.
    """
    if "conditions" in status:
        return [str(row["text"]) for row in status["conditions"] if row["degrades"]]
    return [str(text) for text in status.get("problems", ()) if _EARLIER_SILENT not in text]
