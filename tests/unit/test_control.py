"""The control adapter against a small control binary that the test writes, and that misbehaves on request."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.base.errors import (
    AlreadyRunningError,
    AmbiguousError,
    ConfigError,
    ControlError,
    DeadlineError,
    NotFoundError,
)
from mpsd.base.limits import SOCKET_PATH_LIMIT
from mpsd.base.model import ProcessInstance, ServerState
from mpsd.mps import answers, pipedir
from mpsd.mps.control import OUTPUT_FILE, ControlDaemon, ControlGoneError, TerminateOutcome

# In the foreground: a daemon that answers over its socket and has one child in place of a server.
# Otherwise: the front end, which passes its stdin on. `behave` in the log directory overrides this.
SCRIPT = """#!{python} -IS
import os, signal, socket, subprocess, sys, time
pipe = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
log = os.environ["CUDA_MPS_LOG_DIRECTORY"]
try:
    behave = open(log + "/behave").read()
except OSError:
    behave = ""
path = pipe + "/control"
if "-f" in sys.argv:
    if behave == "mute":
        sys.exit(1)
    print("foreground with", sorted(os.environ), flush=True)
    if behave == "die":
        sys.exit("no usable device")
    if behave == "never":
        signal.pause()
    open(pipe + "/nvidia-cuda-mps-control.pid", "w").write(str(os.getpid()))
    server = subprocess.Popen(["/bin/sleep", "600"])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    value = "100.0"
    while True:
        peer = listener.accept()[0]
        words = peer.recv(4096).decode().split()
        match words:
            case ["get_server_list"]: reply = f"{{server.pid}}\\n"
            case ["get_server_status", pid]: reply = ("Server not found", "ACTIVE")[int(pid) == server.pid]
            case ["get_client_list", _]: reply = "11\\n12\\n"
            case ["terminate_client", _, "11"]: reply = "0\\n"
            case ["terminate_client", _, "12"]: reply = "999\\n"
            case ["terminate_client", _, "14"]: reply = "201\\n"
            case ["terminate_client", _, pid]: reply = f"Invalid process {{pid}}!\\n1\\n"
            case ["set_default_active_thread_percentage", value]: reply = value + "\\n"
            case ["get_default_active_thread_percentage"]: reply = value + "\\n"
            case ["environment"]: reply = repr(dict(os.environ))
            case ["quit"]: reply = ""
            case _: reply = "Invalid command\\n"
        peer.sendall(reply.encode())
        peer.close()
        if words == ["quit"]:
            server.kill(); server.wait(); os.unlink(path); sys.exit(0)
text = sys.stdin.read()
if behave == "hang":
    subprocess.Popen(["/bin/sleep", "600"])
    signal.pause()
if behave == "busy":
    with open(log + "/turned-away", "a+") as file:
        file.write("x"); file.seek(0); times = len(file.read())
    if times == 1:
        print("Cannot send command to MPS control daemon process"); sys.exit(1)
    if times == 2:
        sys.exit(0)
    os.write(1, b"FAULT\\n"); sys.exit(0)
if behave == "flood":
    while True:
        os.write(1, b"x" * 65536)
if behave == "garbage":
    os.write(1, b"\\xff\\x00 what? \\x1b[31m"); sys.exit(0)
if behave == "mute":
    sys.exit(3)
if behave == "leave":
    subprocess.Popen(["/bin/sleep", "600"], stdin=subprocess.DEVNULL); os.write(1, b"7\\n"); sys.exit(0)
try:
    peer = socket.socket(socket.AF_UNIX); peer.connect(path)
except OSError:
    print("Cannot find MPS control daemon process"); sys.exit(1)
peer.sendall(text.encode())
while data := peer.recv(4096):
    os.write(1, data)
"""


class Rig:
    def __init__(self, root: Path) -> None:
        self.binary = root / "nvidia-cuda-mps-control"
        self.binary.write_text(SCRIPT.format(python=sys.executable))
        self.binary.chmod(0o755)
        self.pipe = root / "pipe"
        self.log = root / "log"
        self.log.mkdir()

    def control(self, **more: object) -> ControlDaemon:
        return ControlDaemon(str(self.binary), str(self.pipe), str(self.log), **more)  # type: ignore[arg-type]

    def behave(self, how: str) -> None:
        (self.log / "behave").write_text(how)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    yield Rig(tmp_path)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"CUDA_MPS_PIPE_DIRECTORY={tmp_path}/pipe".encode() in environment.split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def test_a_daemon_is_started_asked_and_quit(rig: Rig) -> None:
    async def scenario() -> None:
        control = rig.control(gpus=["GPU-1", "GPU-2"], environment={"EXTRA": "yes"})
        await control.start(20)
        assert control.alive() and control.instance is not None
        (server,) = await control.servers()
        assert [s.pid for s in control.server_instances()] == [server]
        assert await control.server_state(server) is ServerState.ACTIVE
        assert await control.server_state(1) is ServerState.GONE
        assert await control.wait_active(10) == server
        assert await control.clients(server) == (11, 12)
        await control.set_default_active_thread_percentage(25.0)
        assert await control.default_active_thread_percentage() == 25.0
        environment = eval(await control.command("environment"))
        assert set(environment) - {"LC_CTYPE"} == {
            "CUDA_MPS_LOG_DIRECTORY",
            "CUDA_MPS_PIPE_DIRECTORY",
            "CUDA_VISIBLE_DEVICES",
            "EXTRA",
            "PATH",
        }
        assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
        await control.quit(20)
        assert not control.alive() and control.reap() == 0
        control.close()

    asyncio.run(scenario())
    assert stat.S_IMODE(rig.pipe.stat().st_mode) == 0o755
    assert stat.S_IMODE(rig.log.stat().st_mode) == 0o750


def test_terminate_client_reads_the_text(rig: Rig) -> None:
    async def scenario() -> None:
        control = rig.control()
        await control.start(20)
        outcomes = [(await control.terminate_client(1, pid, 10)).outcome for pid in (11, 12, 13, 14)]
        assert outcomes == [
            TerminateOutcome.DONE,
            TerminateOutcome.REFUSED,
            TerminateOutcome.NOT_A_CLIENT,
            TerminateOutcome.NOT_A_CLIENT,
        ]
        with pytest.raises(ControlError, match="Invalid command"):
            await control.set_default_client_priority(1)
        rig.behave("hang")
        assert (await control.terminate_client(1, 11, 0.05)).outcome is TerminateOutcome.DEADLINE
        assert await control.kill()
        control.close()

    asyncio.run(scenario())


def test_the_daemon_gets_no_descriptor_of_ours_and_its_own_session(rig: Rig) -> None:
    async def scenario() -> None:
        control = rig.control()
        leaked = os.open("/dev/zero", os.O_RDONLY)
        os.set_inheritable(leaked, True)
        await control.start(20)
        assert control.instance is not None
        pid = control.instance.pid
        targets = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")}
        assert "/dev/zero" not in targets
        assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
        assert os.readlink(f"/proc/{pid}/fd/1") == str(rig.log / OUTPUT_FILE)
        assert os.getsid(pid) == pid
        os.close(leaked)
        assert await control.kill()
        assert control.server_instances() == ()
        control.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("how", "error"),
    [("hang", DeadlineError), ("flood", ControlError), ("garbage", ControlError), ("mute", ControlError)],
)
def test_a_misbehaving_front_end_is_an_error_and_is_gone(rig: Rig, how: str, error: type[Exception]) -> None:
    rig.behave(how)

    async def scenario() -> None:
        with pytest.raises(error):
            await rig.control().servers(0.3 if how == "hang" else 20)

    before = set(os.listdir("/proc/self/fd"))
    asyncio.run(scenario())
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_front_end_that_was_turned_away_is_sent_again(rig: Rig) -> None:
    rig.behave("busy")
    assert asyncio.run(rig.control().server_state(9, 20)) is ServerState.FAULT
    assert (rig.log / "turned-away").read_text() == "xxx"


def test_commands_take_turns(rig: Rig) -> None:
    async def scenario() -> None:
        control = rig.control()
        rig.behave("hang")
        first = asyncio.ensure_future(control.servers(20))
        await asyncio.sleep(0)
        # The second call finds the first in progress and fails at its own deadline.
        with pytest.raises(DeadlineError, match="busy"):
            await control.servers(0.05)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        rig.behave("leave")
        assert await control.servers(20) == (7,)

    asyncio.run(scenario())


def test_a_missed_deadline_is_named_whole_and_not_by_what_was_left_of_it(rig: Rig) -> None:
    async def scenario() -> None:
        control = rig.control()
        first = asyncio.create_task(control.servers(0.2))
        await asyncio.sleep(0)
        # This command waits for the first one, so less than its deadline is left when it begins.
        with pytest.raises(DeadlineError, match=r"\(get_client_list 7\) did not end within 0\.5 s$"):
            await control.clients(7, 0.5)
        with pytest.raises(DeadlineError, match=r"within 0\.2 s$"):
            await first
        with pytest.raises(DeadlineError, match=r"no server in .* became ACTIVE within 0\.3 s"):
            await control.wait_active(0.3)

    rig.behave("hang")
    asyncio.run(scenario())


def test_a_daemon_whose_socket_was_removed_is_not_waited_for(rig: Rig) -> None:
    """No command reaches it, so it never hears of quit. The caller ends it by force."""

    async def scenario() -> None:
        control = rig.control()
        await control.start(20)
        os.unlink(pipedir.socket_path(str(rig.pipe)))
        with pytest.raises(DeadlineError, match="did not quit"):
            async with asyncio.timeout(20):
                await control.quit(600)
        assert control.alive()
        await control.kill()
        control.close()

    asyncio.run(scenario())


def test_the_files_of_a_daemon_do_not_depend_on_the_umask(rig: Rig) -> None:
    async def scenario() -> None:
        before = os.umask(0o077)
        try:
            control = rig.control()
            await control.start(20)
        finally:
            os.umask(before)
        assert rig.pipe.stat().st_mode & 0o777 == 0o755
        assert os.stat(pipedir.socket_path(str(rig.pipe))).st_mode & 0o777 == 0o755
        await control.quit(20)
        control.close()

    asyncio.run(scenario())


def test_a_grandchild_that_keeps_the_output_open_delays_nothing(rig: Rig) -> None:
    rig.behave("leave")
    assert asyncio.run(rig.control().servers(20)) == (7,)


def test_no_daemon_is_told_apart(rig: Rig) -> None:
    with pytest.raises(ControlGoneError):
        asyncio.run(rig.control().servers(20))


def test_one_command_a_line(rig: Rig) -> None:
    for text in ("quit\nquit", " "):
        with pytest.raises(ControlError, match="one command"):
            asyncio.run(rig.control().command(text))


def test_a_daemon_that_dies_at_once_is_quoted(rig: Rig) -> None:
    rig.behave("die")
    with pytest.raises(ControlError, match="no usable device"):
        asyncio.run(rig.control().start(20))


def test_a_daemon_that_dies_without_a_word_is_explained(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.behave("mute")
    with pytest.raises(ControlError, match="with status 1: no output"):
        asyncio.run(rig.control().start(20))
    monkeypatch.setattr("mpsd.mps.control._full", lambda directory: True)
    with pytest.raises(ControlError, match=r"no space is left in .*free disk space"):
        asyncio.run(rig.control().start(20))


def test_a_daemon_that_never_answers_is_killed(rig: Rig) -> None:
    rig.behave("never")

    async def scenario() -> None:
        control = rig.control()
        with pytest.raises(DeadlineError):
            await control.start(0.3)
        assert not control.alive()
        control.close()

    asyncio.run(scenario())


def test_a_binary_that_is_not_there(rig: Rig) -> None:
    rig.binary.unlink()
    with pytest.raises(ControlError, match="cannot run"):
        asyncio.run(rig.control().start(20))
    with pytest.raises(ControlError, match="cannot run"):
        asyncio.run(rig.control().servers())


def test_adoption_needs_the_same_life_program_and_directory(rig: Rig, tmp_path: Path) -> None:
    async def scenario() -> None:
        first = rig.control()
        await first.start(20)
        assert first.instance is not None
        instance = first.instance
        first.close()
        arguments = (str(rig.binary), str(rig.pipe), str(rig.log))
        adopted = ControlDaemon.adopt(*arguments, instance)
        assert await adopted.default_active_thread_percentage() == 100.0
        with pytest.raises(AmbiguousError, match="used again"):
            ControlDaemon.adopt(*arguments, ProcessInstance(instance.pid, instance.start_ticks - 1))
        with pytest.raises(AmbiguousError, match="serves"):
            ControlDaemon.adopt(arguments[0], str(tmp_path / "other"), arguments[2], instance)
        with pytest.raises(AmbiguousError, match="not mpsd's control daemon"):
            ControlDaemon.adopt("/bin/true", *arguments[1:], instance)
        # After a driver update the same name leads to another file.
        ControlDaemon.adopt(f"/nowhere/{rig.binary.name}", *arguments[1:], instance).close()
        with pytest.raises(AlreadyRunningError):
            await rig.control().start(20)
        assert await adopted.kill()
        adopted.close()
        with pytest.raises((NotFoundError, AmbiguousError)):
            ControlDaemon.adopt(*arguments, instance)
        # Files of a dead control daemon do not stop the next one.
        assert pipedir.ownership(str(rig.pipe)).owner is pipedir.Owner.STALE
        second = rig.control()
        await second.start(20)
        await second.quit(20)
        second.close()

    asyncio.run(scenario())


def test_files_of_a_live_owner_are_left_alone(tmp_path: Path) -> None:
    directory = str(tmp_path)
    (tmp_path / pipedir.PID_FILE).write_text(str(os.getpid()))
    os.utime(tmp_path / pipedir.PID_FILE)
    (tmp_path / "control_lock").touch()
    # This process is alive, but it serves another directory: the pid was used again.
    assert pipedir.ownership(directory).owner is pipedir.Owner.STALE
    (tmp_path / pipedir.PID_FILE).write_text("not a number")
    assert pipedir.ownership(directory) == pipedir.Ownership(pipedir.Owner.STALE, None)
    assert set(pipedir.clear_stale(directory)) == {"control_lock", pipedir.PID_FILE}
    assert pipedir.ownership(directory).owner is pipedir.Owner.NOBODY


def test_a_path_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    fits = "/" + "x" * (SOCKET_PATH_LIMIT - len("/control_privileged") - 1)
    pipedir.check_length(fits)
    with pytest.raises(ConfigError, match="too long"):
        pipedir.check_length(fits + "x")


def test_replies_are_read_tolerantly() -> None:
    assert answers.pids("") == ()
    assert answers.pids(" 12\n13 14\n") == (12, 13, 14)
    assert answers.server_state(" fault \n") is ServerState.FAULT
    assert answers.terminated("0").outcome is TerminateOutcome.DONE
    assert answers.terminated("").outcome is TerminateOutcome.REFUSED
    # Driver 580, a server that does not exist: the last line is an error, not success.
    absent = "Server 9 not found\nServer 9 not found!\n1"
    assert answers.terminated(absent).outcome is TerminateOutcome.REFUSED
    assert answers.server_state("Server 999999 not found") is ServerState.GONE
    assert answers.accepted("start_server", "") == ""
    assert answers.percentage("25.0\n") == 25.0
    assert answers.priority("Default client priority is 1\n") == 1
    for parse, text in (
        (answers.pids, "12 x"),
        (answers.pids, f"12 {(1 << 22) + 1}"),
        (answers.pids, "9" * 5000),
        (answers.percentage, "nan"),
        (answers.percentage, "100.5"),
        (answers.percentage, "1e300"),
        (answers.priority, "2"),
        (answers.priority, "9" * 5000),
        (answers.server_state, "DANCING"),
        (answers.percentage, "\n"),
        (answers.priority, "none"),
    ):
        with pytest.raises(ControlError):
            parse(text)
