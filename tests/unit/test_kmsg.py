"""Xids out of kernel log records."""

from __future__ import annotations

import errno
import json
import os
import select
from pathlib import Path

import pytest

from mpsd.base.errors import GpuError, UnsupportedError
from mpsd.base.model import KernelXid
from mpsd.os import kmsg

EXPECTED = json.loads((Path(__file__).parents[1] / "data" / "nvidia-580" / "expected.json").read_text())
MMU = (
    "NVRM: Xid (PCI:0000:9A:00): 31, pid=4242, name=python3, Ch 00000013, intr 00000000. MMU Fault: "
    "ENGINE GRAPHICS GPC2 GPCCLIENT_T1_7 faulted @ 0x7e00_00000000. "
    "Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE"
)


def test_a_record_with_pid_and_name() -> None:
    xid = kmsg.parse_record(f"4,1234,567890,-;{MMU}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:9a:00.0\n")
    assert xid == KernelXid("0000:9a:00.0", 31, 4242, "python3", MMU, 567890)


@pytest.mark.parametrize(
    ("text", "pci", "number", "pid", "name"),
    [
        ("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus.", "0000:44:00.0", 79, None, ""),
        ("NVRM: Xid (PCI:0000:44:00): 13, Graphics SM Warp Exception", "0000:44:00.0", 13, None, ""),
        ("NVRM: Xid (PCI:0000:44:00 GPU-I:03): 43, pid=7, name=a b, Ch 1", "0000:44:00.0", 43, 7, "a b"),
        (
            "NVRM: Xid (PCI:00000001:44:00.1): 43, pid='<unknown>', name=<unknown>, Ch 1",
            "0001:44:00.1",
            43,
            None,
            "",
        ),
        ("NVRM: Xid (PCI:0000:44:00): 48", "0000:44:00.0", 48, None, ""),
        (
            "NVRM: Xid (PCI:0000:44:00): 43, pid=7, name=a, Stack Error, Ch 01",
            "0000:44:00.0",
            43,
            7,
            "a, Stack Error",
        ),
        ("NVRM: Xid (PCI:0000:44:00): 43, pid=7, name=a, Ch 2, Ch 01", "0000:44:00.0", 43, 7, "a, Ch 2"),
        ("NVRM: Xid (PCI:0000:44:00): 43, pid=7, name=a, Reset", "0000:44:00.0", 43, 7, "a"),
        (
            "NVRM: Xid (PCI:0000:44:00): 43, pid=7, name=evil\\x1b\\x5c[31m, Ch 1",
            "0000:44:00.0",
            43,
            7,
            "evil\x1b\\[31m",
        ),
    ],
)
def test_shapes_of_the_line(text: str, pci: str, number: int, pid: int | None, name: str) -> None:
    xid = kmsg.parse_record(f"4,1,2,-;{text}")
    assert xid is not None
    assert (xid.pci, xid.xid, xid.pid, xid.name) == (pci, number, pid, name)


@pytest.mark.parametrize(
    "record",
    ["", ";", "4,1,2,-;usb 1-1: new device", f"x,1,2,-;{MMU}", MMU, f"4,1,2;{MMU}", f"4,1,2,-;say {MMU}"],
)
def test_other_records_are_none(record: str) -> None:
    assert kmsg.parse_record(record) is None


@pytest.mark.parametrize(
    "record",
    [
        f"{'9' * 5000},1,2,-;{MMU}",
        f"4,1,{'9' * 5000},-;{MMU}",
        f"4,1,2,-;NVRM: Xid (PCI:0000:44:00): {'9' * 5000}",
        f"4,1,2,-;NVRM: Xid (PCI:{'0' * 5000}:44:00): 31",
    ],
)
def test_a_number_out_of_bounds_makes_no_xid(record: str) -> None:
    assert kmsg.parse_record(record) is None


def test_a_file_that_cannot_be_read_is_a_missing_capability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "kmsg", os.open

    def refuse(name: str, flags: int, mode: int = 0o777) -> int:
        if name == str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(name, flags, mode)

    log = kmsg.open_kernel_log(str(path))
    path.write_text("")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(GpuError, match="Permission denied"):
        log.drain()
    log.close()
    with pytest.raises(UnsupportedError, match="Permission denied"):
        kmsg.open_kernel_log(str(path))


def test_what_a_program_wrote_to_the_device_is_no_xid() -> None:
    assert kmsg.parse_record(f"12,1,2,-;{MMU}", kernel_only=True) is None
    assert kmsg.parse_record(f"4,1,2,-;{MMU}", kernel_only=True) is not None


def test_a_file_is_followed_from_now_on(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(f"4,1,2,-;{MMU}\n")
    log = kmsg.open_kernel_log(str(path))
    assert log.drain() == []
    with path.open("a") as out:
        out.write(f"4,2,3,-;{MMU}\n SUBSYSTEM=pci\n6,3,4,-;hello\n4,4,5,-;{MMU}\n")
    assert select.select([log], [], [], 0)[0]
    assert [xid.timestamp_us for xid in log.drain()] == [3, 5]
    log.close()


def test_the_device_is_bounded_and_survives_an_overrun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    records: list[bytes | OSError] = [
        OSError(errno.EPIPE, "overrun"),
        f"4,1,2,-;{MMU}".encode() + b"\xff\n",
        f"12,1,2,-;{MMU}".encode(),
        f"4,1,3,-;{MMU}".encode(),
        BlockingIOError(),
    ]

    def read(fd: int, size: int) -> bytes:
        assert size == kmsg.RECORD_LIMIT
        item = records.pop(0)
        if isinstance(item, OSError):
            raise item
        return item

    path = tmp_path / "ring"
    path.touch()
    ring = kmsg.KernelRing(str(path))
    monkeypatch.setattr(os, "read", read)
    monkeypatch.setattr(kmsg, "RECORDS_PER_DRAIN", 3)
    assert [xid.timestamp_us for xid in ring.drain()] == [2]
    assert ring.overruns == 1
    assert [xid.timestamp_us for xid in ring.drain()] == [3]
    monkeypatch.undo()
    assert not os.get_inheritable(ring.fileno())
    ring.close()


def test_no_kernel_log_is_a_capability_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="kernel log"):
        kmsg.KernelRing(str(tmp_path / "none"))


@pytest.mark.parametrize("kind", sorted(EXPECTED))
def test_recorded_xids_are_those_that_nvml_reported(kind: str) -> None:
    expected = EXPECTED[kind]
    found = [xid for record in expected["kmsg"] if (xid := kmsg.parse_record(record, kernel_only=True))]
    assert {xid.pci for xid in found} <= {"0000:00:06.0"}
    # The lines of Xid 13 name no process; NVML reports the 43 that comes after them.
    assert [xid.xid for xid in found if xid.xid != 13] == expected["nvml_xids"]
    known = {expected["server"], expected["survivor"], expected["offender"]}
    assert all(xid.pid in known for xid in found if xid.xid != 13)
    assert all(xid.pid is None for xid in found if xid.xid == 13)
    assert len(found) == sum("Xid" in record for record in expected["kmsg"])
