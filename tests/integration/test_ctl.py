"""mpsd-ctl as an operator uses it: with a running daemon, without one, and with invalid arguments."""

from __future__ import annotations

import json
import os
import pty
import pwd
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpsd_client
from mpsd.base.conditions import Code
from mpsd.ctl.__main__ import main
from mpsd.ctl.watch import ENTER, LEAVE
from tests.support.listening import DEADLINE_S, RunningListener, frame
from tests.support.site import OTHER_UID, Program, Site, as_user

COMMAND = [sys.executable, "-m", "mpsd.ctl"]
VERBS = (
    "status",
    "kill",
    "policy",
    "protect",
    "events",
    "faults",
    "conditions",
    "failovers",
    "doctor",
    "drain",
    "undrain",
    "env",
    "vault",
    "version",
)
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site() as started:
        yield started.start()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short path, for sockets."""
    with tempfile.TemporaryDirectory(prefix="mpsd-test-") as where:
        yield Path(where)


Done = subprocess.CompletedProcess[str]


def ctl(where: Site | str, *arguments: str) -> Done:
    """Run mpsd-ctl. It never shows a traceback."""
    path = where if isinstance(where, str) else where.socket
    done = subprocess.run(
        [*COMMAND, *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "MPSD_SOCKET": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def said(done: Done, status: int = 0) -> str:
    assert done.returncode == status, (done.stdout, done.stderr)
    return done.stdout


def test_status_names_the_client_and_what_protects_it(site: Site) -> None:
    client = site.join()
    text = said(ctl(site, "status"))
    row = next(line for line in text.splitlines() if line.startswith(f"{client.pid} "))
    assert row.split()[1] == pwd.getpwuid(os.geteuid()).pw_name and row.endswith("obey")
    assert re.search(r"^GPU 0 .* GiB", text, re.M) and "\x1b" not in text
    detail = next(
        line
        for line in said(ctl(site, "status", "-v")).splitlines()
        if line.startswith(f"pid {client.pid}: ")
    )
    assert "attached" in detail and "lease" in detail and "tracker" in detail
    view = json.loads(said(ctl(site, "status", "--json")))
    assert view["schema"] == 1 and client.pid in {c["pid"] for c in view["clients"]}
    assert "PROTECTED" in text
    assert "PROTECTED" not in said(ctl(site, "status", "--no-headers"))
    client.finish()


def test_env_is_something_that_a_shell_evaluates(site: Site) -> None:
    script = f'eval "$({" ".join(COMMAND)} --socket "$1" env)" && printf %s "$CUDA_MPS_PIPE_DIRECTORY"'
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", site.socket],
        env=site.environ(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    wanted = json.loads(said(ctl(site, "env", "--json")))["env"]["CUDA_MPS_PIPE_DIRECTORY"]
    assert done.stdout == wanted and os.path.isdir(wanted)
    fish = said(ctl(site, "env", "--shell", "fish")).splitlines()
    assert f"set -gx CUDA_MPS_PIPE_DIRECTORY '{wanted}';" in fish and fish == sorted(fish)
    assert "there is no GPU 'seven'" in ctl(site, "env", "--gpu", "seven").stderr
    (gpu,) = json.loads(said(ctl(site, "status", "--json")))["gpus"]
    assert f"did you mean '{gpu['uuid']}'?" in ctl(site, "env", "--gpu", gpu["uuid"] + "0").stderr


def test_kill_first_only_says_what_it_would_do(site: Site) -> None:
    client = site.join()
    plan = said(ctl(site, "kill", str(client.pid), "--dry-run"))
    assert f"would evict process {client.pid}:" in plan and "SIGKILL" in plan
    assert client.process.poll() is None
    done = json.loads(said(ctl(site, "kill", str(client.pid), "--json", "--reason", "test")))
    assert done["outcome"] == "evicted" and done["evict_ms"] > 0
    client.wait()


def test_kill_refuses_what_is_not_that_client(site: Site) -> None:
    client = site.join()
    assert "not a client" in ctl(site, "kill", str(os.getpid())).stderr
    wrong = ctl(site, "kill", str(client.pid), "--start-ticks", "1")
    assert said(wrong, 13) == "" and "used again" in wrong.stderr
    for bad in ("0", "1", "-5", "99999999"):
        assert ctl(site, "kill", "--", bad).returncode == 2
    assert client.process.poll() is None
    client.finish()


@root_only
def test_others_are_told_that_they_may_not(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    client = site.join()
    for arguments, status in ((("kill", str(client.pid)), 1), (("drain",), 4), (("undrain", "--dry-run"), 4)):
        with as_user(OTHER_UID):
            assert main(["--socket", site.socket, *arguments]) == status
        shown = capsys.readouterr()
        assert shown.out == "" and "mpsd group" in shown.err
    with as_user(OTHER_UID):
        assert main(["--socket", site.socket, "policy", str(client.pid), "evict"]) == 4
        assert f"user {OTHER_UID} may not set the consequence" in capsys.readouterr().err
        assert main(["--socket", site.socket, "version"]) == 0
        capsys.readouterr()
        assert main(["--socket", site.socket, "faults"]) == 0
        assert main(["--socket", site.socket, "failovers"]) == 0
    empty = "no faults recorded that you may see\nno fail-overs that you may see\n"
    assert capsys.readouterr().out == empty
    assert client.process.poll() is None
    client.finish()


def on_a_terminal(site: Site, client: Program, answer: bytes) -> tuple[int, str]:
    """Run kill on a terminal and answer its question. Return its status and the terminal's output."""
    master, slave = pty.openpty()
    shown = b""
    with subprocess.Popen(
        [*COMMAND, "--socket", site.socket, "kill", str(client.pid)],
        env=site.environ(),
        stdin=slave,
        stdout=slave,
        stderr=slave,
    ) as process:
        os.close(slave)
        try:
            while b"[y/N]" not in shown:
                assert select.select([master], [], [], DEADLINE_S)[0], shown
                shown += os.read(master, 4096)
            os.write(master, answer)
            status = process.wait(DEADLINE_S)
        finally:
            process.kill()
            os.close(master)
    return status, shown.decode()


def test_kill_on_a_terminal_asks_first(site: Site) -> None:
    client = site.join()
    status, shown = on_a_terminal(site, client, b"n\n")
    assert status == 1 and f"this would evict process {client.pid}:" in shown
    assert client.process.poll() is None
    assert on_a_terminal(site, client, b"y\n")[0] == 0
    client.wait()


def test_events_are_listed_and_followed(site: Site) -> None:
    site.join().finish()
    listed = [json.loads(line) for line in said(ctl(site, "events", "--json")).splitlines()]
    assert listed and all({"seq", "kind"} <= event.keys() for event in listed)
    last = listed[-1]["seq"]
    assert said(ctl(site, "events", "--since", str(last))) == f"no events after {last}\n"
    assert said(ctl(site, "events", "--json", "--since", str(last))) == ""
    with subprocess.Popen(
        [*COMMAND, "--socket", site.socket, "events", "--follow", "--json", "--since", str(last - 1)],
        env=site.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as follower:
        try:
            assert follower.stdout is not None and follower.stderr is not None
            assert json.loads(follower.stdout.readline())["seq"] == last
            client = site.join()
            assert json.loads(follower.stdout.readline())["seq"] > last
            client.finish()
            follower.send_signal(signal.SIGINT)
            assert follower.wait(DEADLINE_S) == 130
            assert follower.stderr.read() == ""
        finally:
            follower.kill()


def test_events_since_one_of_an_earlier_life_say_so() -> None:
    with Site() as site:
        site.start()
        site.client_environ()
        last = json.loads(said(ctl(site, "events", "--json")).splitlines()[-1])["seq"]
        site.kill()
        site.start()
        site.client_environ()
        client = site.join()
        for since, words in (
            (last, f"event {last} is older than the daemon's last start; showing "),
            (10**9, f"there is no event {10**9} yet; showing "),
        ):
            done = ctl(site, "events", "--json", "--since", str(since))
            assert done.returncode == 0
            assert done.stderr.startswith(f"mpsd-ctl: {words}") and len(done.stderr.splitlines()) == 1
            shown = [json.loads(line) for line in done.stdout.splitlines()]
            assert shown and all(event["seq"] > last for event in shown)
            assert f" {len(shown)} kept event" in done.stderr
        with mpsd_client.connect(site.socket) as connection:
            assert connection.subscribe(last).gap == "earlier"
            assert connection.subscribe(0).gap == connection.subscribe().gap == ""
        client.finish()


def test_a_reader_that_leaves_is_no_error(site: Site) -> None:
    script = f'{" ".join(COMMAND)} --socket "$1" status; echo "$?" >&2'
    with subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", site.socket],
        env=site.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "0\n"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "--socket", site.socket, "status"],
            env=site.environ(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    assert done.returncode == 1 and done.stderr == "mpsd-ctl: cannot write: No space left on device\n"


def test_a_drained_machine_says_so(site: Site) -> None:
    assert re.fullmatch(r"not drained: GPU-\S+; nothing was changed\n", said(ctl(site, "undrain")))
    assert said(ctl(site, "drain", "--dry-run")).startswith("would drain ")
    assert json.loads(said(ctl(site, "status", "--json")))["draining"] is False
    drained = said(ctl(site, "drain", "--reason", "test"))
    assert drained.startswith("drained GPU-") and "are refused until mpsd-ctl undrain" in drained
    try:
        assert said(ctl(site, "drain")).startswith("already drained: GPU-")
        assert "drained" in ctl(site, "status").stdout
        refused = ctl(site, "env")
        assert refused.returncode == 69 and refused.stdout == "false\n"
        assert "is drained" in refused.stderr and "mpsd-ctl undrain --gpu GPU-" in refused.stderr
    finally:
        said(ctl(site, "undrain"))
    assert ctl(site, "env").returncode == 0


def test_the_list_of_conditions_needs_no_daemon(place: Path) -> None:
    listed = said(ctl(str(place / "none"), "conditions"))
    assert all(f"{code}: " in listed for code in Code)
    assert listed.startswith("All conditions that mpsd knows. mpsd-ctl status shows those that hold now.\n")
    (row,) = json.loads(said(ctl(str(place / "none"), "conditions", "gpu-lost", "--json")))["conditions"]
    assert row["code"] == "gpu-lost" and row["remedy"] and row["degrades"] and row["refuses"]
    wrong = ctl(str(place / "none"), "conditions", "gpu-last")
    assert wrong.returncode == 1 and "did you mean gpu-lost?" in wrong.stderr


def test_faults_doctor_and_version(site: Site) -> None:
    assert said(ctl(site, "faults")) == "no faults recorded\n"
    for deed in (["list"], ["keep", str(os.getpid()), "name"], ["free", "name"]):
        assert "the vault is off" in ctl(site, "vault", *deed).stderr
    assert json.loads(said(ctl(site, "faults", "--json"))) == {"schema": 1, "faults": []}
    checks = ctl(site, "doctor", "--json")
    assert checks.returncode in (0, 10)
    assert {"name", "ok", "finding", "remedy"} == set(json.loads(checks.stdout)["checks"][0])
    assert "simulated" in said(ctl(site, "version"))


def test_watching_survives_a_daemon_that_goes_and_comes(place: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "--socket", str(place / "mpsd.sock"), "status", "--watch", "0.02", "--json"],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watcher:
        try:
            assert watcher.stdout is not None and watcher.stderr is not None
            assert "no daemon answers" in watcher.stdout.readline()
            watcher.send_signal(signal.SIGINT)
            assert watcher.wait(DEADLINE_S) == 130
            assert watcher.stderr.read() == ""
        finally:
            watcher.kill()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_watching_on_a_narrow_terminal_leaves_it_as_it_was(site: Site, encoding: str) -> None:
    client = site.join()
    master, slave = pty.openpty()
    shown = b""
    with subprocess.Popen(
        [*COMMAND, "--socket", site.socket, "status", "--watch", "0.02"],
        env=site.environ() | {"COLUMNS": "60", "LINES": "24", "NO_COLOR": "1", "PYTHONIOENCODING": encoding},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    ) as process:
        os.close(slave)
        try:
            while shown.count(b"\x1b[J") < 2:
                assert select.select([master], [], [], DEADLINE_S)[0], shown
                shown += os.read(master, 4096)
            process.send_signal(signal.SIGTERM)
            while not shown.endswith(LEAVE.encode()):
                assert select.select([master], [], [], DEADLINE_S)[0], shown
                shown += os.read(master, 4096)
            assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
        finally:
            process.kill()
            os.close(master)
    client.finish()
    assert shown.startswith(ENTER.encode())
    frame = shown.decode(encoding).split("\x1b[H")[1].partition("\x1b[J")[0].replace("\x1b[K", "")
    lines = [line.rstrip("\r") for line in frame.split("\n")]
    assert "\x1b" not in frame and max(map(len, lines)) <= 60
    # The command of the client is wider than the terminal.
    (row,) = [line for line in lines if line.startswith(f"{client.pid} ")]
    assert row.endswith("..." if encoding == "ascii" else "…")


def nothing(arguments: list[str]) -> str:
    """Return what a failed command prints. A shell that evaluates the output must see that env failed."""
    return "false\n" if arguments == ["env"] else ""


def test_without_a_daemon(place: Path) -> None:
    nowhere = str(place / "mpsd.sock")
    for arguments in (["status"], ["kill", "99"], ["events"], ["faults"], ["drain"], ["env"]):
        done = ctl(nowhere, *arguments)
        assert said(done, 3) == nothing(arguments) and "start it" in done.stderr
        assert done.stderr.count("\n") == 1
    assert "not running" in said(ctl(nowhere, "version"))
    assert json.loads(said(ctl(nowhere, "version", "--json")))["daemon"] is None
    assert said(ctl(nowhere, "faults", "--explain", "mmu-null")).startswith("mmu-null: ")
    assert "did you mean 'mmu-null'" in ctl(nowhere, "faults", "--explain", "mmu-nul").stderr
    listed = ctl(nowhere, "faults", "--explain", "foo").stderr.partition("(one of: ")[2].partition(";")[0]
    assert "sm-trap" in listed and listed.split(", ") == sorted(listed.split(", "))
    doctor = ctl(nowhere, "doctor")
    assert doctor.returncode in (0, 10) and "checked by mpsd-ctl" in doctor.stdout


def test_a_daemon_that_talks_nonsense(place: Path) -> None:
    path = place / "mpsd.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            for _ in range(2):
                peer, _ = listener.accept()
                with peer:
                    peer.recv(64)
                    peer.sendall(frame(b"nonsense") * 10)
                    peer.recv(64)

        thread = threading.Thread(target=answer)
        thread.start()
        for arguments in (["status"], ["env"]):
            done = ctl(str(path), *arguments)
            assert said(done, 1) == nothing(arguments) and "does not speak ZMTP" in done.stderr
        thread.join(DEADLINE_S)


def test_a_daemon_of_another_release(place: Path) -> None:
    # Its answers are valid messages without the fields that this release reads.
    with RunningListener(place / "mpsd.sock") as running:
        for arguments in (["status"], ["env"], ["kill", "4711"]):
            done = ctl(str(running.path), *arguments)
            assert said(done, 1) == nothing(arguments) and "one release" in done.stderr


def test_paths_and_command_lines_that_cannot_be_meant(place: Path) -> None:
    assert "longer than 107 bytes" in ctl("/" + "x" * 120, "version").stderr
    for arguments in (
        ["frobnicate"],
        [],
        ["kill"],
        ["kill", "x"],
        ["status", "--watch", "0"],
        ["status", "--watch", "x"],
        ["faults", "--limit", "0"],
        ["events", "--since", "-1"],
        ["env", "--shell", "tcl"],
        ["kill", "5", "--timeout", "601"],
    ):
        done = ctl(str(place / "mpsd.sock"), *arguments)
        assert said(done, 2) == "" and "usage:" in done.stderr
    for arguments, meant in (
        (["statu"], "status"),
        (["env", "--shell", "fsh"], "fish"),
        (["vault", "kep", "1"], "keep"),
    ):
        assert f": did you mean '{meant}'?" in ctl("/nowhere", *arguments).stderr
    assert "did you mean" not in ctl("/nowhere", "frobnicate").stderr
    assert "did you mean `mpsd-ctl --help`, or `mpsd help` " in ctl("/nowhere", "help").stderr
    assert "did you mean `mpsd help limits`?" in ctl("/nowhere", "limits").stderr
    wrong = ctl("/nowhere", "drain", "7")
    assert said(wrong, 2) == "" and "unrecognized arguments: 7: `mpsd-ctl drain --help` " in wrong.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "--json" in text and len(text) > 200
    assert max(map(len, text.splitlines())) <= 110


def test_the_help_names_every_command_and_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"    {verb} " in text for verb in VERBS)
    for status in (0, 1, 2, 3, 4, 10, 11, 12, 13):
        assert re.search(rf"\b{status}  \w", text)


def test_the_socket_may_stand_before_or_after_the_command(place: Path) -> None:
    for arguments in (["--socket", str(place / "a"), "status"], ["status", "--socket", str(place / "a")]):
        assert str(place / "a") in ctl("/nowhere", *arguments).stderr
