"""S1: a user's domain is closed to every other user, and mpsd says so where it is not.

The stock files are open to every user (FIFO `log` 0777, `control` 0666), and one line in the FIFO silences
the log for good: only the mode of the directory keeps strangers out.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from mpsd.base.conditions import Code
from mpsd.ctl.statustext import status as status_text
from mpsd.ctl.style import Style
from tests.support.conditioning import rows_of
from tests.support.site import DEADLINE_S, OTHER_UID, Site, as_user, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
THIRD_UID = 65533
FORGED = b"[2026-01-01 00:00:00.000 Server 1] Server is handling a fatal GPU error.\n"
MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)

# Become a user, perhaps in namespaces of its own, and only then run mpsd-run: the user may be unable to read
# the interpreter's modules.
MPSD_RUN = """
import ctypes, os, sys
from mpsd_client import run
libc, (uid, hidden, mapped), arguments = ctypes.CDLL(None, use_errno=True), sys.argv[1:4], sys.argv[4:]
def check(result):
    if result:
        sys.exit("cannot: " + os.strerror(ctypes.get_errno()))
if hidden:
    check(libc.unshare(0x20000))
    check(libc.mount(None, b"/", None, 0x4000 | 0x40000, None))
    check(libc.mount(b"none", hidden.encode(), b"tmpfs", 0, b"mode=700"))
os.setgroups([])
os.setgid(int(uid))
os.setuid(int(uid))
if mapped:
    libc.prctl(4, 1, 0, 0, 0)
    check(libc.unshare(0x10000000))
    with open("/proc/self/uid_map", "w") as file:
        file.write(f"0 {uid} 1")
sys.exit(run.main(arguments))
"""


def mpsd_run(
    site: Site, uid: int, *arguments: str, hidden: str = "", mapped: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run mpsd-run as a user: with an empty closed directory mounted over `hidden`, as uid 0 of a user
    namespace (`mapped`). Skip the test if this machine permits neither."""
    done = subprocess.run(
        [sys.executable, "-c", MPSD_RUN, str(uid), hidden, "yes" if mapped else "", *arguments],
        env=site.environ() | {"MPSD_SOCKET": site.socket},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd="/",
    )
    if done.stderr.startswith("cannot: "):
        pytest.skip(f"no namespaces or mounts here: {done.stderr.strip()}")
    return done


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(path))


ACTIONS: Mapping[str, Callable[[Path], object]] = {
    "list": os.listdir,
    "connect": lambda directory: connect(directory / "control"),
    "create": lambda directory: (directory / "x").write_text(""),
    "write the FIFO": lambda directory: write_line(directory / "log"),
    "take the lock": lambda directory: os.close(os.open(directory / "control_lock", os.O_RDWR)),
    "read the pid": lambda directory: (directory / "nvidia-cuda-mps-control.pid").read_text(),
}


def refused(directory: Path, uid: int, *but: str) -> set[str]:
    """Return what the kernel refuses a user in a pipe directory, of all actions but some."""
    found = set()
    with as_user(uid):
        for name, action in ACTIONS.items():
            try:
                if name not in but:
                    action(directory)
            except PermissionError:
                found.add(name)
    return found


def write_line(fifo: Path, text: bytes = FORGED) -> None:
    fd = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def log_of(site: Site, domain: str) -> str:
    return (site.log_dir / domain / "control.log").read_text()


def domain_of(site: Site, uid: int | None, *, shared: bool = False) -> str:
    """Return the domain to which a user's slot leads."""
    return os.path.basename(os.readlink(site.client_environ(uid, shared=shared)["CUDA_MPS_PIPE_DIRECTORY"]))


def environ_in(site: Site, domain: str) -> dict[str, str]:
    """Return the environment of a program that joins this very domain, or runs outside MPS on this node."""
    where = {"CUDA_MPS_PIPE_DIRECTORY": f"{site.run_dir}/d/{domain}", "MPSD_SIM_DIR": str(site.node_dir)}
    return site.environ() | where


def silenced(site: Site, domain: str, fifo: Path, uid: int) -> None:
    """Write a line as a user into a domain's FIFO, start a client, and check that the log stays as it was."""
    with as_user(uid):
        write_line(fifo)
    assert site.control(domain, "get_server_list")
    before = log_of(site, domain)
    program = site.program(uid=uid, environ=environ_in(site, domain))
    assert program.do("dev.on_mps") == {"result": True}
    assert log_of(site, domain) == before
    assert "handling a fatal GPU error" not in before


def test_a_stranger_reaches_nothing_of_a_users_domains(site: Site) -> None:
    """S1: the directories of the active and the standby domain stop every other user."""
    site.start()
    theirs = site.join(uid=OTHER_UID)
    status = site.until(
        lambda s: [d["uid"] for d in s["domains"] if d["control_pid"]] == [OTHER_UID] * 2, "a standby domain"
    )
    assert [d["private"] for d in status["domains"]] == [True, True]
    for row in status["domains"]:
        directory = site.run_dir / "d" / row["id"]
        assert refused(directory, THIRD_UID) == set(ACTIONS)
        # Root's control daemon works there: the owner enters, and plants nothing in its way.
        assert refused(directory, OTHER_UID, "write the FIFO") == {"create"}
    # The log still follows.
    again = site.join(uid=OTHER_UID)
    assert f"NEW CLIENT {again.pid}" in log_of(site, domain_of(site, OTHER_UID))
    assert theirs.do("1 + 1") == {"result": 2}


def test_a_program_pointed_at_a_strangers_domain_is_listed_with_the_reason(site: Site) -> None:
    """S1: CUDA runs the program outside MPS without an error, so status says which directory is closed."""
    site.start()
    path = site.client_environ(OTHER_UID)["CUDA_MPS_PIPE_DIRECTORY"]
    stranger = site.program(uid=THIRD_UID, environ=environ_in(site, "") | {"CUDA_MPS_PIPE_DIRECTORY": path})
    assert stranger.do("dev.on_mps") == {"result": False}
    status = site.until(lambda s: s["gpus"][0]["not_on_mps"], "the process outside MPS")
    (row,) = status["gpus"][0]["not_on_mps"]
    closed = f"{site.run_dir}/d/{os.path.basename(os.readlink(path))}"
    told = f"uid {THIRD_UID} may not enter {closed}, to which {path} leads; start the program with mpsd-run"
    assert (row["pid"], row["reason"]) == (stranger.pid, told)
    assert status["clients"] == []
    assert f"  pid {stranger.pid} is not on MPS: {told}" in status_text(status, Style())
    # Another user learns neither the pid nor the path.
    (hidden,) = site.ask(lambda c: c.status(), uid=OTHER_UID)["gpus"][0]["not_on_mps"]
    assert (hidden["pid"], hidden["reason"]) == (None, "")


@pytest.mark.parametrize("place", ["d", "s"])
def test_mpsd_run_starts_no_program_that_would_run_outside(site: Site, place: str) -> None:
    """S1: a container without a part of run_dir. mpsd-run names the directory and starts nothing."""
    site.start()
    ran = site.base / "ran"
    script = ["sh", "-c", f"touch {ran}"]
    hidden = f"{site.run_dir}/{place}"
    done = mpsd_run(site, OTHER_UID, *script, hidden=hidden)
    assert (done.returncode, done.stdout, ran.exists()) == (69, "", False)
    assert done.stderr.startswith(
        f"mpsd-run: cannot join MPS: uid {OTHER_UID} may not enter {hidden} (EACCES); "
    )
    assert len(done.stderr.splitlines()) == 1
    done = mpsd_run(site, OTHER_UID, "--env", hidden=hidden)
    assert (done.returncode, done.stdout) == (69, "false\n")
    # Where it may enter, the program runs.
    assert mpsd_run(site, OTHER_UID, "true").returncode == 0


def test_mpsd_standby_says_why_it_starts_no_process(site: Site) -> None:
    """S1: mpsd-standby tries again for a while, and tells the reason at once."""
    site.start()
    script = MPSD_RUN.replace("mpsd_client import run", "mpsd_client.standby import command as run")
    hidden = f"{site.run_dir}/d"
    with subprocess.Popen(
        [sys.executable, "-c", script, "0", hidden, "", "--", "sh", "-c", "echo ran"],
        env=site.environ() | {"MPSD_SOCKET": site.socket},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            told = process.stderr.readline()
        finally:
            process.kill()
        if told.startswith("cannot: "):
            pytest.skip(f"no mounts here: {told.strip()}")
        assert f"cannot join MPS: {hidden}/" in told and "does not exist (ENOENT)" in told
        assert process.stdout.read() == ""


def test_a_mapped_uid_counts_as_the_kernel_counts_it(site: Site) -> None:
    """S1: uid 0 of a user namespace joins as the user that the host sees, and enters no domain of root."""
    site.start()
    roots = site.client_environ()["CUDA_MPS_PIPE_DIRECTORY"]
    looks = f'id -u; echo $CUDA_MPS_PIPE_DIRECTORY; ls "$CUDA_MPS_PIPE_DIRECTORY/"; ls {roots}/'
    done = mpsd_run(site, OTHER_UID, "sh", "-c", looks, mapped=True)
    uid, path, *files = done.stdout.split()
    assert (uid, path) == ("0", site.client_environ(OTHER_UID)["CUDA_MPS_PIPE_DIRECTORY"])
    assert path != roots and "control" in files
    assert done.returncode != 0 and "Permission denied" in done.stderr


def test_a_line_of_the_owner_silences_its_own_log_alone(site: Site) -> None:
    """S1: the owner may write its FIFO. Only its own log ends; a forged line appears in no log."""
    site.start()
    ours, theirs = domain_of(site, None), domain_of(site, OTHER_UID)
    silenced(site, theirs, site.run_dir / "d" / theirs / "log", OTHER_UID)
    program = site.join()
    assert f"NEW CLIENT {program.pid}" in log_of(site, ours)
    assert site.faults() == []


def test_a_line_of_a_stranger_silences_the_log_of_a_shared_domain(site: Site) -> None:
    """S1: a shared domain is open, as with stock MPS."""
    site.start()
    shared = domain_of(site, None, shared=True)
    silenced(site, shared, site.run_dir / "d" / shared / "log", THIRD_UID)
    assert site.faults() == []
    (row,) = (d for d in site.status()["domains"] if d["id"] == shared)
    assert (row["user"], row["private"]) == (None, False)


@pytest.fixture
def without_acls() -> Iterator[Path]:
    """Return a directory on a file system without ACLs."""
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as name:
        if _libc.mount(b"none", name.encode(), b"ramfs", 0, b"mode=755"):
            pytest.skip(f"cannot mount a ramfs: {os.strerror(ctypes.get_errno())}")
        try:
            yield Path(name)
        finally:
            _libc.umount2(name.encode(), MNT_DETACH)


def test_a_file_system_without_acls_is_told_in_one_line(without_acls: Path) -> None:
    """S1: the domain starts open, and status, doctor and log say what stays open and the remedy."""
    with Site(run_dir=f'"{without_acls}/r"') as site:
        site.run_dir = without_acls / "r"
        site.start()
        theirs = site.join(uid=OTHER_UID)
        assert theirs.do("dev.on_mps") == {"result": True}
        status, (row, *_) = site.status(), site.status()["domains"]
        told = f"run_dir {site.run_dir} is on a file system without POSIX ACLs: other users can enter users' "
        told += "domains and write their logs"
        (open_domains,) = rows_of(status, Code.DOMAINS_OPEN)
        assert open_domains["text"] == told and open_domains["remedy"] == "mount it on tmpfs or ext4"
        assert row["private"] is False
        assert f"  {row['id']}: open to all users" in status_text(status, Style())
        (check,) = (c for c in site.ask(lambda c: c.doctor()) if c["name"] == "private domains")
        assert (check["ok"], check["finding"], check["remedy"]) == (False, told, "mount it on tmpfs or ext4")
        until(lambda: "without POSIX ACLs" in site.log.read_text(), "the log says so")
        with as_user(THIRD_UID):
            assert "control" in os.listdir(site.run_dir / "d" / row["id"])
        assert site.log.read_text().count("without POSIX ACLs") == 1


def test_an_open_domain_of_an_earlier_mpsd_is_shown_until_it_ends() -> None:
    """S1: adoption changes no living domain. Later domains are private."""
    with Site(domains__private="false", domains__spare="false") as site:
        site.start()
        program = site.join(uid=OTHER_UID)
        site.kill()
        site.write_config(domains__private="true")
        site.start()
        (row,) = site.status()["domains"]
        assert (row["uid"], row["private"]) == (OTHER_UID, False)
        assert f"  {row['id']}: open to all users" in status_text(site.status(), Style())
        assert rows_of(site.status(), Code.DOMAINS_OPEN) == []
        program.fault()
        later = site.join(uid=OTHER_UID)
        status = site.until(lambda s: any(c["pid"] == later.pid for c in s["clients"]), "a later client")
        (client,) = (c for c in status["clients"] if c["pid"] == later.pid)
        assert {d["id"]: d["private"] for d in status["domains"]}[client["domain"]] is True
        # The next mpsd sees it from the directory alone.
        site.kill()
        site.start()
        assert {d["id"]: d["private"] for d in site.status()["domains"]}[client["domain"]] is True


def test_an_mpsd_of_an_ordinary_user_is_closed_to_other_users() -> None:
    """S1: without root there is one user, and mode 0700 suffices."""
    with Site() as site:
        site.base.chmod(0o777)
        site.launch(uid=OTHER_UID, environ={"HOME": str(site.base)})
        site.wait_ready()
        path = site.client_environ(OTHER_UID)["CUDA_MPS_PIPE_DIRECTORY"]
        (row, *_) = site.status()["domains"]
        assert row["private"] is True
        assert os.stat(path).st_mode & 0o777 == 0o700
        assert refused(Path(path), THIRD_UID) == set(ACTIONS)
