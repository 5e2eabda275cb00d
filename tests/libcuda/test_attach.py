"""Named GPU buffers: programs attach to them, die and return, with a real daemon.

The stand-in driver's memory is memfds; the daemon's GPU is simulated.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mpsd.vault import messages
from mpsd_client.vault import Vault
from tests.support.attaching import Attacher
from tests.support.libcudas import DEADLINE_S, MPSD_RUN, ROOT, Libraries, run
from tests.support.site import OTHER_UID, Site, as_user, until

MIB = 1 << 20
PATTERN = "bytes((7 * i + i // 251) % 256 for i in range({size}))"
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(protect='"guard"') as started:
        yield started.start()


def environment(libraries: Libraries, site: Site | None, **extra: str) -> dict[str, str]:
    where = {"MPSD_SOCKET": site.socket if site is not None else "/nonexistent/mpsd.sock"}
    path = {"PYTHONPATH": f"{ROOT / 'clients'}:{ROOT}"}
    return {**libraries.environment(proxied=False), **path, **where, **extra}


def attacher(libraries: Libraries, site: Site | None, **extra: str) -> Attacher:
    return Attacher(environment(libraries, site, **extra))


def holdings(site: Site) -> list[dict[str, Any]]:
    return [dict(row) for row in site.ask(lambda client: client.vault_list())]


def kept(site: Site) -> list[str]:
    return sorted(row["name"] for row in holdings(site))


def test_a_killed_program_s_buffer_is_found_again_with_every_byte(site: Site, libraries: Libraries) -> None:
    size = 5 * MIB - 24
    pattern = eval(PATTERN.format(size=size))
    with attacher(libraries, site) as first:
        first.do(f"b = m.attach('model', {size}); other = m.attach('moments', 100)")
        assert first.do("(b.found, b.persistent, b.nbytes, b.shape)") == (False, True, size, (size,))
        assert first.do("b.read() == bytes(b.nbytes)"), "a new buffer is zeros"
        first.do(f"b.write({PATTERN.format(size=size)})")
        first.do("b.write(bytearray(b'patch'), offset=1000); other.write(b'other')")
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
    pattern = pattern[:1000] + b"patch" + pattern[1005:]
    with attacher(libraries, site) as second:
        second.do(f"b = m.attach('model', size={size})")
        assert second.do("(b.found, b.persistent)") == (True, True)
        assert second.do("__import__('hashlib').sha256(b.read()).hexdigest()") == digest(pattern)
        second.end(signal.SIGKILL)
        # The program dies before the daemon restarts, so no daemon sees it end.
    site.kill()
    site.start()
    assert kept(site) == ["model", "moments"]
    with attacher(libraries, site) as third:
        site.kill()
        site.start()
        # Without a size, attach() takes the whole buffer: full granules.
        third.do("b = m.attach('model'); other = m.attach('moments')")
        assert third.do("(b.found, b.nbytes, other.nbytes)") == (True, 6 * MIB, 2 * MIB)
        assert third.do(f"__import__('hashlib').sha256(b.read({size})).hexdigest()") == digest(pattern)
        assert third.do("other.read(5)") == b"other"
        site.kill()
        third.end(signal.SIGKILL)
    site.start()
    with attacher(libraries, site) as last:
        assert last.do("m.attach('moments').read(5)") == b"other"
        assert last.do("m.forget('model'), m.forget('model')") == (True, False)
        last.do("b = m.attach('moments'); b.forget()")
        assert last.do("(b.persistent, b.read(5))") == (False, b"other")
        assert last.end() == 0
    assert holdings(site) == []


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_under_the_proxy_both_connections_are_one_client_s(site: Site, libraries: Libraries) -> None:
    """The proxy and the client library of one program count as one client: its allocations end with it,
    its attached buffer stays."""
    extra = {"MPSD_LIBCUDA_DIR": str(libraries.proxy), "MPSD_STANDIN_GPU": "simulated"}
    alloc = "p = ctypes.c_uint64(); cuda.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(3 << 20))"
    start = "cuda = ctypes.CDLL('libcuda.so.1'); c = ctypes.c_void_p(); cuda.cuInit(0)"
    with Attacher(environment(libraries, site, **extra), MPSD_RUN) as program:
        program.do(f"{start}; cuda.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0); cuda.cuCtxSetCurrent(c)")
        program.do(alloc)
        until(lambda: len(holdings(site)) == 1, "the proxy brought its piece")
        program.do("b = m.attach('weights', 100); b.write(b'weights')")
        program.do(alloc)
        rows = until(lambda: [h for h in (holdings(site),) if len(h) == 3], "and another")[0]
        assert {row["pid"] for row in rows} == {program.pid}
        assert [row["name"] for row in rows] == [None, "weights", None]
        # Keeping the program's memory as a whole leaves named buffers unchanged.
        answer = site.ask(lambda client: client.vault_keep(program.pid, "rest"))
        assert answer["bytes"] == 8 * MIB
        assert kept(site) == ["rest", "rest", "weights"]
        assert program.do("m.attach('rest')")[0] == "name-taken"
        program.end(signal.SIGKILL)
    with Attacher(environment(libraries, site, **extra), MPSD_RUN) as again:
        again.do("b = m.attach('weights')")
        assert again.do("(b.found, b.read(7))") == (True, b"weights")
        assert again.end() == 0
    assert kept(site) == ["rest", "rest", "weights"]


def test_a_token_that_changes_within_a_process_is_refused(site: Site, libraries: Libraries) -> None:
    with attacher(libraries, site, MPSD_VAULT_TOKEN="one") as program:
        program.do("b = m.attach('weights', 100)")
        program.do("os.environ['MPSD_VAULT_TOKEN'] = 'two'")
        code, text = program.do("m.attach('moments', 100)")
        assert code == "denied" and "keep MPSD_VAULT_TOKEN as it was" in text


def test_one_living_process_has_it_at_a_time(site: Site, libraries: Libraries) -> None:
    with attacher(libraries, site) as one, attacher(libraries, site) as two:
        one.do("b = m.attach('weights', 100); b.write(b'one')")
        code, text = two.do("m.attach('weights', 100)")
        assert code == "in-use" and "end that process, or choose another name" in text
        code, text = one.do("m.attach('weights')")
        assert code == "in-use" and "already attached in this process" in text
        # A view keeps the buffer mapped in this process; without a view the next process can attach.
        one.do("v = b.view(); b.close()")
        assert two.do("m.attach('weights')")[0] == "in-use"
        one.do("del v; b = m.attach('weights'); b.close(); b.close()")
        assert two.do("m.attach('weights').read(3)") == b"one"
        assert one.do("m.attach('weights')")[0] == "in-use"
        two.end(signal.SIGKILL)
        assert one.do("m.attach('weights').read(3)") == b"one"


def test_a_program_that_replaces_itself_comes_back_to_it(site: Site, libraries: Libraries) -> None:
    with attacher(libraries, site) as program:
        program.do("b = m.attach('weights', 100); b.write(b'before')")
        script = ROOT / "tests" / "support" / "attaching.py"
        program.become(f"os.execv(sys.executable, [sys.executable, {str(script)!r}])")
        assert program.do("m.attach('weights').read(6)") == b"before"
        program.do("c = m.attach('moments', 100)")
        assert program.end() == 0
    assert kept(site) == ["moments", "weights"]


def test_a_program_that_replaced_itself_keeps_nothing_from_others(site: Site, libraries: Libraries) -> None:
    """After exec() a program holds no buffer, although it had no connection between two requests to report
    that."""
    with attacher(libraries, site) as program, attacher(libraries, site) as other:
        program.do("b = m.attach('weights', 100); b.write(b'before')")
        assert other.do("m.attach('weights')")[0] == "in-use"
        script = ROOT / "tests" / "support" / "attaching.py"
        program.become(f"os.execv(sys.executable, [sys.executable, {str(script)!r}])")
        other.do("b = m.attach('weights')")
        assert other.do("b.read(6)") == b"before"
        assert program.do("m.attach('weights')")[0] == "in-use"


def test_what_is_wrong_is_said_with_its_remedy(site: Site, libraries: Libraries) -> None:
    with attacher(libraries, site) as program, attacher(libraries, site) as other:
        program.do("m.attach('weights', 3 << 20).close()")
        wrong = {
            "m.attach('weights', 1 << 20)": ("usage", "forget() it first"),
            "m.attach('weights', 5 << 20)": ("usage", "has 4194304 bytes"),
            "m.attach('nothing')": ("not-found", "give a size to make it"),
            "m.attach('a b', 5)": ("usage", "without blanks"),
            "m.attach('17', 5)": ("usage", "not a number"),
            "m.attach('ä', 5)": ("usage", "ASCII"),
            "m.attach('weights', 0)": ("usage", "1 or more"),
            "m.attach('weights', device=1)": ("usage", "this process sees 1"),
            "m.attach('weights', 1 << 50)": ("usage", "weights"),
            "m.attach('huge', 1 << 50)": ("cuda", "CUDA_ERROR_OUT_OF_MEMORY"),
        }
        for line, (code, text) in wrong.items():
            said = program.do(line)
            assert said[0] == code and text in said[1], (line, said)
        # None of the rejected calls left anything that blocks another process.
        assert other.do("m.attach('weights', 4 << 20).found") is True
        assert kept(site) == ["weights"]


@root_only
def test_another_owner_finds_nothing(site: Site, libraries: Libraries) -> None:
    with attacher(libraries, site, MPSD_VAULT_TOKEN="secret") as program:
        program.do("b = m.attach('weights', 100); b.write(b'mine')")
        program.end(signal.SIGKILL)
    with attacher(libraries, site) as stranger:
        assert stranger.do("m.attach('weights')")[0] == "not-found"
        assert stranger.do("m.forget('weights')") is False
        # The same name under another owner is another buffer.
        assert stranger.do("(lambda b: (b.found, b.read(4)))(m.attach('weights', 100))") == (False, bytes(4))
    with as_user(OTHER_UID):
        thief = Vault(str(site.run_dir / "vault.sock"), b"secret".ljust(32, b"\0"))
    with thief:
        assert thief.take("weights", 1) is None
        assert thief.release("weights") is False
    with attacher(libraries, site, MPSD_VAULT_TOKEN="secret") as owner:
        assert owner.do("m.attach('weights').read(4)") == b"mine"


def test_without_a_daemon_a_session_goes_on_and_says_so(libraries: Libraries) -> None:
    with attacher(libraries, None) as program:
        code, text = program.do("m.attach('weights', 100)")
        assert code == "no-vault" and "start mpsd" in text
        program.do("import warnings; warnings.simplefilter('always')")
        program.do("s = m.session(); b = s.attach('weights', 100); c = s.attach('moments', 3 << 20)")
        assert program.do("(b.persistent, b.found, b.read(3), c.nbytes)") == (False, False, bytes(3), 3 * MIB)
        program.do("b.write(b'abc'); w = s.on_event(print)")
        assert program.do("(b.read(3), b.view('int8', 3).__dlpack_device__(), w.connected)") == (
            b"abc",
            (2, 0),
            False,
        )
        assert program.do("s.attach('weights', 100)")[0] == "in-use"
        assert program.do("s.attach('nothing')")[0] == "no-vault"
        program.do("b.forget(); s.close(); s.close()")
        assert program.do("b.pointer")[1] == "the buffer is closed (attach it again)"
        assert program.end() == 0
    assert program.said.count("NotPersistentWarning: buffers are not persistent") == 1


def test_without_a_vault_the_daemon_is_not_blamed(libraries: Libraries) -> None:
    with Site() as plain:
        plain.start()
        with attacher(libraries, plain) as program:
            code, text = program.do("m.attach('weights', 100)")
            assert code == "no-vault" and "offers no vault" in text and "[vault]" in text


def test_over_quota_a_session_goes_on(libraries: Libraries) -> None:
    with Site(protect='"guard"', vault__client_bytes=str(4 * MIB)) as small:
        small.start()
        with attacher(libraries, small) as program:
            program.do("s = m.session(); a = s.attach('a', 100); b = s.attach('b', 3 << 20)")
            assert program.do("(a.persistent, b.persistent)") == (True, False)
            code, text = program.do("m.attach('c', 3 << 20)")
            assert code == "quota" and "mpsd.toml" in text
            program.do("s.close()")
            assert program.do("m.attach('a').found") is True
            assert program.end() == 0
        assert program.said.count("NotPersistentWarning") == 1


@contextmanager
def vault_that_ends(path: Path) -> Iterator[None]:
    """Run a vault that greets each client and disappears at the first request."""

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                hello = messages.unpack(sock.recv(messages.LAYOUT.size))
                sock.send(messages.pack(hello, answer=True))
                sock.recv(messages.LAYOUT.size)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_where_the_daemon_ends_in_the_middle_a_session_goes_on(libraries: Libraries, tmp_path: Path) -> None:
    path = tmp_path / "vault.sock"
    with vault_that_ends(path), attacher(libraries, None, MPSD_VAULT_SOCKET=str(path)) as program:
        assert program.do("m.attach('weights', 100)")[0] == "protocol"
        program.do("s = m.session(); b = s.attach('weights', 100); b.write(b'abc')")
        assert program.do("(b.persistent, b.read(3))") == (False, b"abc")
        assert program.end() == 0
    assert "NotPersistentWarning: buffers are not persistent" in program.said


def test_without_a_driver_it_is_said(libraries: Libraries, site: Site, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    with attacher(libraries, site, LD_LIBRARY_PATH=str(tmp_path)) as program:
        code, text = program.do("m.attach('weights', 100)")
        assert code == "cuda" and "no CUDA driver" in text and "on a machine with a GPU" in text
        assert program.do("m.session().attach('weights', 100)")[0] == "cuda"
    assert holdings(site) == []


def test_many_cycles_leak_nothing(site: Site, libraries: Libraries) -> None:
    with attacher(libraries, site) as program:
        program.do("from mpsd_client import _dlpack")
        program.do("files = lambda: len(os.listdir('/proc/self/fd'))")
        # Count only the stand-in's mappings: the interpreter makes its own.
        program.do("maps = lambda: open('/proc/self/maps').read().count('mpsd-standin-vmm')")
        cycle = "b = m.attach('weights', 100); v = b.view('int32'); c = v.__dlpack__(); del c, v; b.close()"
        program.do(cycle)
        before = program.do("(files(), maps(), _dlpack.export_count())")
        assert before[1:] == (0, 0)
        for _ in range(60):
            program.do(cycle)
            assert program.do("m.attach('weights', 9 << 20)")[0] == "usage"
            assert program.do("m.attach('nothing')")[0] == "not-found"
        assert program.do("(files(), maps(), _dlpack.export_count())") == before


def test_a_forked_child_harms_nothing(site: Site, libraries: Libraries) -> None:
    with attacher(libraries, site) as program:
        program.do("b = m.attach('weights', 100); b.write(b'mine')")
        child = "(os.fork() or (globals().pop('b').close(), __import__('gc').collect(), os._exit(7)))"
        assert program.do(f"os.waitstatus_to_exitcode(os.waitpid({child}, 0)[1])") == 7
        assert program.do("b.read(4)") == b"mine"
        program.do("b.close(); b = m.attach('weights')")
        assert program.do("(b.found, b.read(4))") == (True, b"mine")


# -- the examples ------------------------------------------------------------------------------------------

EXAMPLES = ROOT / "clients" / "examples"


class Service:
    """Talk to cache_service.py line by line."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / "cache_service.py")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.ready = self.hear()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self, how: int | None = None) -> str:
        """End the process and return its stderr."""
        if how is not None:
            self.process.send_signal(how)
        return self.process.communicate(timeout=DEADLINE_S)[1]


@contextmanager
def service(environment: dict[str, str]) -> Iterator[Service]:
    started = Service(environment)
    try:
        yield started
    finally:
        if started.process.returncode is None:
            started.end(signal.SIGKILL)


def test_the_cache_example_survives_its_death(site: Site, libraries: Libraries) -> None:
    with service(environment(libraries, site)) as first:
        assert first.ready == "ready: 0 entries, kept"
        assert (
            first.ask("put colour red")
            == first.ask("put size 7 feet")
            == first.ask("put colour blue")
            == "ok"
        )
        assert first.ask("put " + "x" * 65 + " y").startswith("error: a key has at most")
        assert first.ask("nonsense").startswith("error: use put KEY VALUE")
        first.end(signal.SIGKILL)
    with service(environment(libraries, site)) as second:
        assert second.ready == "ready: 2 entries, kept"
        assert (second.ask("get colour"), second.ask("get size"), second.ask("get x")) == (
            "blue",
            "7 feet",
            "none",
        )
        assert second.ask("forget").startswith("ok")
        assert second.end() == "" and second.process.returncode == 0
    assert holdings(site) == []


def test_the_cache_example_begins_where_its_first_process_ended_at_once(
    site: Site, libraries: Libraries
) -> None:
    with attacher(libraries, site) as first:
        first.do("b = m.attach('cache', 2 << 20)")
        first.end(signal.SIGKILL)
    with service(environment(libraries, site)) as second:
        assert second.ready == "ready: 0 entries, kept"
        second.end(signal.SIGKILL)
    with attacher(libraries, site) as other:
        other.do("b = m.attach('cache'); b.write(b'something else')")
    with service(environment(libraries, site)) as third:
        assert "choose another --name" in third.end()


def test_the_cache_example_without_a_daemon_and_without_a_gpu(libraries: Libraries, tmp_path: Path) -> None:
    with service(environment(libraries, None)) as alone:
        assert alone.ready == "ready: 0 entries, not kept"
        assert (alone.ask("put a b"), alone.ask("get a")) == ("ok", "b")
        assert "and end with this process" in alone.end()
    (tmp_path / "libcuda.so.1").write_text("no library")
    with service(environment(libraries, None, LD_LIBRARY_PATH=str(tmp_path))) as blind:
        assert blind.ready == ""
        assert "cache_service: no CUDA driver" in blind.end() and blind.process.returncode == 2


def test_the_training_example_says_what_it_lacks(libraries: Libraries) -> None:
    """The training example exits with the name of the missing PyTorch or GPU; no test runs it further."""
    done = run([sys.executable, EXAMPLES / "resume_training.py"], environment(libraries, None))
    assert done.returncode == 2
    assert re.fullmatch(r"resume_training: (this example needs PyTorch|PyTorch sees no GPU).*\n", done.stderr)
