"""Lines that a shell evaluates: the variable gets exactly the value, whatever it contains."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpsd_client
from mpsd_client.env import obstacle
from tests.support.site import OTHER_UID, as_user

PRINT = "import os, sys; sys.stdout.buffer.write(os.environb[b'V'])"
VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=40)


@settings(max_examples=25, deadline=None)
@given(VALUES)
def test_sh_gets_the_very_value(value: str) -> None:
    script = "\n".join([*mpsd_client.export_lines({"V": value}), 'exec "$PYTHON" -c "$PRINT"'])
    done = subprocess.run(
        ["/bin/sh", "-c", script],
        env={"PYTHON": sys.executable, "PRINT": PRINT},
        capture_output=True,
        check=True,
        timeout=90,
    )
    assert done.stdout.decode() == value


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("sh", "export V='a'\\''b!$(x)\\'"),
        ("csh", "setenv V 'a'\\''b\\!$(x)\\';"),
        ("fish", "set -gx V 'a\\'b!$(x)\\\\';"),
    ],
)
def test_each_shell_has_its_own_quoting(shell: str, line: str) -> None:
    assert mpsd_client.export_lines({"V": "a'b!$(x)\\"}, shell) == [line]


def test_names_and_values_that_no_shell_takes_are_refused() -> None:
    for environment in ({"A B": "x"}, {"": "x"}, {"1A": "x"}, {"A\n": "x"}, {"A": "\0"}):
        with pytest.raises(mpsd_client.UsageError):
            mpsd_client.export_lines(environment)
    with pytest.raises(mpsd_client.UsageError, match="sh, csh, fish"):
        mpsd_client.export_lines({}, "tcl")


@pytest.mark.parametrize(
    ("shell", "line"), [("sh", "unset V"), ("csh", "unsetenv V;"), ("fish", "set -e V;")]
)
def test_a_variable_without_a_value_is_unset(shell: str, line: str) -> None:
    assert mpsd_client.export_lines({"V": None}, shell) == [line]


# Whether this process can join at a pipe directory.


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Return a run directory with a slot, a domain, and a listener that speaks another type of socket."""
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as name:
        base = Path(name)
        base.chmod(0o755)
        for place in ("d", "s", "d/d1"):
            (base / place).mkdir(mode=0o755)
        (base / "s" / "me").symlink_to(base / "d" / "d1")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(base / "d" / "d1" / "control"))
            listener.listen()
            (base / "d" / "d1" / "control").chmod(0o666)
            yield base


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
def test_a_listener_of_any_type_is_no_obstacle(run_dir: Path, kind: socket.SocketKind) -> None:
    (run_dir / "d" / "d1" / "control").unlink()
    with socket.socket(socket.AF_UNIX, kind) as listener:
        listener.bind(str(run_dir / "d" / "d1" / "control"))
        listener.listen()
        assert obstacle(str(run_dir / "s" / "me"), 0) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
@pytest.mark.parametrize("closed", ["", "d", "s", "d/d1"])
def test_the_closed_directory_is_named(run_dir: Path, closed: str) -> None:
    (run_dir / closed).chmod(0o700)
    with as_user(OTHER_UID):
        found = obstacle(str(run_dir / "s" / "me"))
    assert found.startswith(f"uid {OTHER_UID} may not enter {run_dir / closed} (EACCES); ")
    assert obstacle(str(run_dir / "s" / "me")) == "", "root may"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_a_socket_that_refuses_this_user_is_named(run_dir: Path) -> None:
    (run_dir / "d" / "d1" / "control").chmod(0o600)
    with as_user(OTHER_UID):
        found = obstacle(str(run_dir / "s" / "me"))
    assert found.startswith(f"uid {OTHER_UID} cannot connect to {run_dir}/s/me/control (EACCES); ")


@pytest.mark.parametrize("gone", ["s/me", "s", "d/d1"])
def test_a_missing_directory_is_named(run_dir: Path, gone: str) -> None:
    (run_dir / gone).rename(run_dir / "elsewhere")
    assert obstacle(str(run_dir / "s" / "me"), 0).startswith(f"{run_dir / gone} does not exist (ENOENT); ")


@pytest.mark.parametrize("how", ["ENOENT", "ECONNREFUSED"])
def test_a_domain_without_a_listener_is_named(run_dir: Path, how: str) -> None:
    control = run_dir / "d" / "d1" / "control"
    control.unlink()
    if how == "ECONNREFUSED":
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(control))
    found = obstacle(str(run_dir / "s" / "me"), 0)
    assert found.startswith(f"no control daemon listens on {run_dir}/s/me/control ({how}); ")


def test_a_domain_that_is_being_replaced_is_waited_for(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "s" / "me").rename(run_dir / "s" / "new")

    def replaced(seconds: float) -> None:
        (run_dir / "s" / "new").rename(run_dir / "s" / "me")

    monkeypatch.setattr("mpsd_client.env.time.sleep", replaced)
    assert obstacle(str(run_dir / "s" / "me"), 60) == ""
