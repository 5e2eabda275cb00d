"""The health of paths to domains: what is mended, and what makes a domain dead."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.config.layout import Layout
from mpsd.mps import pathhealth
from mpsd.mps.pathhealth import PathHealth, Trouble
from mpsd.os import acl

USER, OTHER = 65534, 65533
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another user's rights")


class Node:
    """One domain d1 with a control socket, and a slot that leads to it."""

    def __init__(self, base: Path) -> None:
        self.layout = Layout(base / "r", base / "l", base / "s")
        self.layout.prepare()
        self.pipe_dir = self.layout.pipe_dir("d1")
        self.pipe_dir.mkdir(mode=0o755)
        self.control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.bind(str(self.pipe_dir / "control"))
        (self.pipe_dir / "control").chmod(0o666)
        self.control.listen(1)
        self.layout.switch("slot", "d1")

    def check(
        self, owner: int | None = USER, slot: str | None = "slot", private: bool = False
    ) -> Trouble | None:
        return self.tried(pathhealth.Path("d1", owner, owner, slot), private)

    def tried(self, path: pathhealth.Path, private: bool = False) -> Trouble | None:
        async def run() -> Trouble | None:
            health = PathHealth(self.layout, private=private)
            try:
                (found,) = await health.check([path])
                return found
            finally:
                health.close()

        return asyncio.run(run())


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as path:
        Path(path).chmod(0o755)
        made = Node(Path(path))
        yield made
        made.control.close()


def test_modes_and_directories_are_mended(node: Node) -> None:
    layout = node.layout
    for path in (layout.run_dir / "d", layout.run_dir / "s", node.pipe_dir):
        path.chmod(0o700)
        assert node.check() is None and path.stat().st_mode & 0o777 == 0o755
    shutil.rmtree(layout.run_dir / "s")
    found = node.check()
    assert found is not None and not found.dead
    layout.switch("slot", "d1")
    assert node.check() is None


def test_a_link_that_leads_elsewhere_is_no_fault_of_the_domain(node: Node) -> None:
    """The slot may just have moved, so the link stays as it is."""
    node.layout.switch("slot", "d9")
    found = node.check()
    assert found is not None and not found.dead and found.text.endswith("/d/d9 does not exist")
    assert node.layout.domain_of_slot("slot") == "d9"


def test_a_private_directory_is_opened_to_its_user_alone(node: Node) -> None:
    node.pipe_dir.chmod(0o700)
    assert node.check(private=True) is None
    assert not node.pipe_dir.stat().st_mode & 0o007


@pytest.mark.parametrize("slot", ["slot", None])
def test_a_domain_without_its_socket_is_dead(node: Node, slot: str | None) -> None:
    (node.pipe_dir / "control").unlink()
    found = node.check(slot=slot)
    assert found is not None and found.dead and found.text == "the control socket of d1 was removed"
    shutil.rmtree(node.pipe_dir)
    found = node.check(slot=slot)
    assert found is not None and found.dead and found.text == "the pipe directory of d1 was removed"


def test_a_domain_whose_socket_no_process_holds_is_dead(node: Node) -> None:
    node.control.close()
    found = node.check(None)
    assert found is not None and found.dead and found.text == "no process holds the control socket of d1"


def test_a_closed_directory_above_is_no_fault_of_the_domain(node: Node) -> None:
    """Another domain would not help, and the directory is the operator's."""
    above = node.layout.run_dir
    above.chmod(0o700)
    found = node.check()
    assert found is not None and found.seen and not found.dead
    assert found.text == f"{above} is closed to its user" and f"chmod o+x {above}" in found.remedy
    assert above.stat().st_mode & 0o777 == 0o700
    assert node.check(0) is None


@pytest.mark.parametrize("slot", ["slot", None])
def test_the_rights_of_one_user_do_not_make_the_domain_of_all_users_dead(
    node: Node, slot: str | None
) -> None:
    """A row of an ACL that no chmod removes keeps one user out; the domain serves all other users."""
    path = pathhealth.Path("d1", None, OTHER, slot)
    keep_out(node.pipe_dir, OTHER)
    found = node.tried(path)
    assert found is not None and found.seen and not found.dead
    assert found.text == f"the pipe directory of d1 is closed to uid {OTHER}"
    assert found.remedy == f"run getfacl {node.pipe_dir} and remove the row that keeps uid {OTHER} out"
    assert node.check(None, slot) is None
    # Without its socket the domain is dead, whichever user asks.
    acl_of(node.pipe_dir, None)
    (node.pipe_dir / "control").unlink()
    found = node.tried(path)
    assert found is not None and found.dead


def test_a_domain_that_is_closed_to_every_user_is_dead_whichever_user_asks(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PathHealth, "_mend", lambda *_: None)
    node.pipe_dir.chmod(0o700)
    found = node.tried(pathhealth.Path("d1", None, OTHER, "slot"))
    assert found is not None and found.dead
    assert found.text == "the pipe directory of d1 is closed to other users"


def keep_out(path: Path, uid: int) -> None:
    """Add a row without rights for this user to the ACL of a directory that is open to all users."""
    none = 0xFFFFFFFF
    rows = ((0x01, 7, none), (0x02, 0, uid), (0x04, 5, none), (0x10, 5, none), (0x20, 5, none))
    acl_of(path, struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *row) for row in rows))


def acl_of(path: Path, value: bytes | None) -> None:
    try:
        if value is None:
            os.removexattr(path, "system.posix_acl_access")
        else:
            os.setxattr(path, "system.posix_acl_access", value)
    except OSError as error:
        if error.errno not in acl.UNSUPPORTED:
            raise
        pytest.skip("this file system has no ACLs")
