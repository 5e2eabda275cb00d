"""The listener over real sockets: identity of the peer, rights, answers, refusals."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

import mpsd_client
from mpsd.base.errors import AlreadyRunningError, ConfigError
from mpsd.peers import Limits
from mpsd.wire import codec
from mpsd.wire.messages import Reply, Request
from tests.support.listening import DEADLINE_S, RunningListener

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket path that every user of the machine can reach."""
    with tempfile.TemporaryDirectory(prefix="mpsd-test-") as where:
        os.chmod(where, 0o755)
        yield Path(where) / "run" / "mpsd.sock"


def as_nobody(path: Path, code: str) -> list[str]:
    """Return the output of a child that runs as an unprivileged user. `client` is its connection."""
    program = (
        "import os, sys, mpsd_client\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "client = mpsd_client.connect(sys.argv[1])\n"
        "def say(*words): print(*words, flush=True)\n"
        "def refused(call):\n"
        "    try: call()\n"
        "    except mpsd_client.MpsdError as error: say(error.code, error.exit_code)\n"
        "    else: say('allowed')\n"
        f"{code}\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


def wait_for(condition: threading.Event) -> None:
    assert condition.wait(DEADLINE_S)


def test_a_request_is_answered_and_its_peer_is_known(path: Path) -> None:
    with RunningListener(path) as running, mpsd_client.connect(str(path)) as client:
        answer = client.status()
    assert (answer["uid"], answer["gid"], answer["pid"]) == (os.getuid(), os.getgid(), os.getpid())
    assert answer["admin"] is True
    peer, request = running.seen[0]
    assert peer.groups >= {os.getgid()} and request.op == "status"


def test_anybody_may_connect_and_the_file_goes_in_the_end(path: Path) -> None:
    with RunningListener(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        assert stat.S_IMODE(path.parent.stat().st_mode) & 0o005 == 0o005
    assert not path.exists()


def test_all_descriptors_are_close_on_exec(path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with RunningListener(path), mpsd_client.connect(str(path)) as client:
        client.version()
        for number in set(os.listdir("/proc/self/fd")) - before:
            try:
                text = Path(f"/proc/self/fdinfo/{number}").read_text()
            except FileNotFoundError:
                continue
            flags = next(line.split()[1] for line in text.splitlines() if line.startswith("flags:"))
            assert int(flags, 8) & os.O_CLOEXEC, os.readlink(f"/proc/self/fd/{number}")
    assert set(os.listdir("/proc/self/fd")) == before


def test_errors_arrive_as_what_they_are(path: Path) -> None:
    with RunningListener(path), mpsd_client.connect(str(path)) as client:
        with pytest.raises(mpsd_client.NotFoundError) as caught:
            client.kill(99)
        assert (caught.value.message, caught.value.remedy) == ("not a client", "look again")
        with pytest.raises(mpsd_client.RemoteError) as broken:
            client.explain("anything")
        assert broken.value.remote_code == "internal"
        assert "a mistake of ours" not in str(broken.value)
        with pytest.raises(mpsd_client.RemoteError):
            client.drain()
        with pytest.raises(mpsd_client.UsageError, match="pid"):
            client.kill(0)
        assert client.kill(4711)["op"] == "kill"


@as_root
def test_somebody_else_is_told_denied(path: Path) -> None:
    with RunningListener(path) as running:
        said = as_nobody(
            path,
            "say(client.status()['uid'], client.status()['admin'])\n"
            "refused(lambda: client.kill(4711))\n"
            "refused(lambda: client.drain(dry_run=True))\n"
            "refused(client.undrain)\n"
            "refused(client.version)",
        )
    assert said == [f"{NOBODY} False", "denied 4", "denied 4", "denied 4", "allowed"]
    # A request for administrators alone does not reach the handler.
    assert not [r for _, r in running.seen if r.op in ("drain", "undrain")]


@as_root
def test_an_owner_may_evict_its_own(path: Path) -> None:
    with RunningListener(path, owner=NOBODY):
        assert as_nobody(path, "say(client.kill(4711)['op'])") == ["kill"]


@as_root
def test_users_get_their_own_events_only(path: Path) -> None:
    history = [
        (1, frozenset({0}), {"kind": "past", "of": "root"}),
        (2, frozenset({NOBODY}), {"kind": "past", "of": "nobody"}),
        (3, frozenset[int](), {"kind": "past", "of": "the machine"}),
    ]
    with RunningListener(path, history=history) as running:
        code = (
            "events = client.subscribe(since_id=0)\n"
            "say(events.kept, next(events)['of'])\n"
            "client.kill(4711)\n"
            "say(next(events)['n'])"
        )

        def publish_when_subscribed() -> None:
            end = time.monotonic() + DEADLINE_S
            while not any(r.op == "kill" for _, r in running.seen):
                assert time.monotonic() < end
                time.sleep(0.005)
            running.publish([(4, frozenset({0}), {"n": 4}), (5, frozenset({NOBODY, 7}), {"n": 5})])

        publisher = threading.Thread(target=publish_when_subscribed)
        running._owner = NOBODY
        publisher.start()
        assert as_nobody(path, code) == ["1 nobody", "5"]
        publisher.join(DEADLINE_S)


def test_events_old_and_new_arrive_in_order(path: Path) -> None:
    history = [(n, frozenset[int](), {"kind": "x", "n": n}) for n in range(1, 6)]
    with RunningListener(path, history=history) as running, mpsd_client.connect(str(path)) as client:
        events, fresh = client.subscribe(since_id=3), client.subscribe()
        running.publish([(6, frozenset(), {"kind": "y", "n": 6})])
        assert (events.kept, fresh.kept) == (2, 0)
        assert [next(events)["n"] for _ in range(3)] == [4, 5, 6]
        assert next(fresh) == {"seq": 6, "kind": "y", "n": 6}
        with pytest.raises(mpsd_client.DeadlineError):
            fresh.next(time.monotonic())


def test_a_slow_subscriber_is_told_once_how_many_it_lost(path: Path) -> None:
    count, text = 20_000, "x" * 1000
    with (
        RunningListener(path, Limits(queued_events=100)) as running,
        mpsd_client.connect(str(path)) as client,
    ):
        events, other = client.subscribe(), client.subscribe()
        running.publish([(n, frozenset(), {"n": n, "text": text}) for n in range(1, count + 1)])
        assert client.version()["op"] == "version"
        got, lost = 0, 0
        while got + lost < count:
            event = events.next(time.monotonic() + DEADLINE_S)
            if event.get("kind") == "lost":
                assert lost == 0
                lost = event["count"]
            else:
                got += 1
        assert lost > 0 and got >= 100
        running.publish([(count + 1, frozenset(), {"n": "next"})])
        assert next(events)["n"] == "next"
        other.close()


def test_an_event_that_cannot_be_said_is_skipped(path: Path) -> None:
    with RunningListener(path) as running, mpsd_client.connect(str(path)) as client:
        events = client.subscribe()
        running.publish([(1, frozenset(), {"n": object()}), (2, frozenset(), {"n": 2})])
        assert next(events)["n"] == 2


def test_a_deadline_ends_a_question_but_not_a_deed(path: Path) -> None:
    with RunningListener(path) as running, mpsd_client.connect(str(path)) as client:
        with pytest.raises(mpsd_client.DeadlineError, match=r"within 0\.05 s"):
            client.doctor(timeout=0.05)
        with pytest.raises(mpsd_client.DeadlineError, match="it goes on"):
            client.kill(4711, reason="wait", timeout=0.05)
        assert client.version()["op"] == "version"
        running.let_go()
        wait_for(running.finished)


def test_a_dealer_of_libzmq_is_a_client_too(path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with RunningListener(path), context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1e3))
        dealer.setsockopt(zmq.HEARTBEAT_IVL, 20)
        dealer.connect(f"ipc://{path}")
        dealer.send(codec.encode(Request(9, "subscribe", {}, 1000)))
        assert codec.decode_answer(dealer.recv()) == Reply(9, {"kept": 0})
        assert dealer.poll(100) == 0
        dealer.send(codec.encode(Request(10, "version", {}, 1000)))
        assert isinstance(codec.decode_answer(dealer.recv()), Reply)
    context.term()


def test_clients_notice_the_end_of_the_daemon(path: Path) -> None:
    with RunningListener(path):
        client = mpsd_client.connect(str(path))
        events = client.subscribe()
    with client:
        with pytest.raises(mpsd_client.NotRunningError):
            next(events)
        with pytest.raises(mpsd_client.NotRunningError):
            client.status()
    with pytest.raises(mpsd_client.NotRunningError, match="no daemon answers"):
        mpsd_client.connect(str(path))


def test_a_socket_in_use_is_not_taken_and_a_stale_one_is(path: Path) -> None:
    with RunningListener(path):
        with pytest.raises(AlreadyRunningError), RunningListener(path):
            pass
        with mpsd_client.connect(str(path)) as client:
            client.version()
    path.touch()
    with RunningListener(path), mpsd_client.connect(str(path)) as client:
        client.version()


@pytest.mark.parametrize("bad", ["/tmp/" + "x" * 120, "/proc/mpsd/mpsd.sock"])
def test_a_path_that_cannot_be_bound(bad: str) -> None:
    with pytest.raises(ConfigError) as caught, RunningListener(Path(bad)):
        pass
    assert bad[:8] in caught.value.message and caught.value.remedy


def test_every_change_is_logged_with_who_asked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import structlog

    structlog.configure(
        processors=[structlog.processors.JSONRenderer()], logger_factory=structlog.PrintLoggerFactory()
    )
    try:
        with RunningListener(path), mpsd_client.connect(str(path)) as client:
            client.status()
            client.kill(4711, reason="too old")
            with pytest.raises(mpsd_client.NotFoundError):
                client.kill(99)
    finally:
        structlog.reset_defaults()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    who = {"peer_uid": os.getuid(), "peer_gid": os.getgid(), "peer_pid": os.getpid()}
    assert all(who.items() <= line.items() for line in lines)
    assert {line["op"] for line in lines} == {"kill"}
    assert [line["event"] for line in lines] == ["asked", "done", "asked", "failed"]
    assert lines[0]["args"]["reason"] == "too old" and lines[3]["code"] == "not-found"


def test_publishing_before_the_start_and_after_the_end_is_harmless(path: Path) -> None:
    running = RunningListener(path)
    running.listener.publish({}, frozenset(), 1)
    asyncio.run(running.listener.close())
    with running:
        pass
    running.listener.publish({}, frozenset(), 2)
