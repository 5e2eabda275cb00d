"""The table of fault classes, and how a class is read from signs."""

from __future__ import annotations

import pytest

from mpsd.base.errors import NotFoundError
from mpsd.base.model import Access, AddressKind, UvmFaultType, UvmReason
from mpsd.core.faults import taxonomy as tx
from tests.support.core import MISALIGNED, OUT_OF_RANGE, REGISTER, STACK, mmu_text, uvm

NAMES = """
mmu-invalid-address mmu-null mmu-use-after-unmap mmu-permission mmu-instruction-fetch pbdma-fault
sm-out-of-range sm-misaligned sm-trap sm-stack-overflow sm-exception device-assert death-in-flight hang
guard-hit server-death control-death device-ecc device-bus device-gsp device-other unattributed-xid
"""


def test_the_classes_are_those_the_harness_knows() -> None:
    assert sorted(tx.CLASSES) == sorted(NAMES.split())
    for name, row in tx.CLASSES.items():
        assert name == row.name
        assert row.title and row.recognised and row.isolated and row.action


def test_a_device_xid_has_one_class_and_is_no_client_xid() -> None:
    numbers = [x for n in tx.CLASSES if n.startswith("device-") for x in tx.CLASSES[n].xids]
    assert len(numbers) == len(set(numbers))
    assert not tx.CLIENT_XIDS & set(numbers)


@pytest.mark.parametrize(
    ("xid", "name"),
    [
        *((x, "device-ecc") for x in (48, 63, 64, 92, 94, 95, 140)),
        *((x, "device-bus") for x in (74, 79)),
        *((x, "device-gsp") for x in (62, 119, 120)),
        (61, "device-other"),
        *((x, None) for x in (13, 31, 32, 43, 45, 69)),
    ],
)
def test_device_class(xid: int, name: str | None) -> None:
    assert tx.device_class(xid) == name


@pytest.mark.parametrize(
    ("event", "lies_there", "name"),
    [
        (uvm(), None, "mmu-invalid-address"),
        (uvm(), AddressKind.FREED, "mmu-use-after-unmap"),
        (uvm(), AddressKind.HOST_MAPPING, "mmu-invalid-address"),
        (uvm(fault_type=UvmFaultType.INVALID_PDE), None, "mmu-invalid-address"),
        (uvm(address=0), None, "mmu-null"),
        (uvm(address=0xFFFF), AddressKind.FREED, "mmu-null"),
        (uvm(address=0x10000), None, "mmu-invalid-address"),
        (uvm(fault_type=UvmFaultType.WRITE), None, "mmu-permission"),
        (uvm(fault_type=UvmFaultType.ATOMIC, access=Access.ATOMIC), None, "mmu-permission"),
        (uvm(reason=UvmReason.PERMISSIONS), None, "mmu-permission"),
        (uvm(address=8, fault_type=UvmFaultType.WRITE), None, "mmu-permission"),
    ],
)
def test_classify_uvm(event: object, lies_there: AddressKind | None, name: str) -> None:
    assert tx.classify_uvm(event, lies_there) == name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (OUT_OF_RANGE, "sm-out-of-range"),
        (MISALIGNED, "sm-misaligned"),
        (STACK, "sm-stack-overflow"),
        (REGISTER, None),
        ("", None),
    ],
)
def test_classify_sm(text: str, name: str | None) -> None:
    assert tx.classify_sm(text) == name


@pytest.mark.parametrize(
    ("before", "client", "after"),
    [
        ("mmu-invalid-address", "GPCCLIENT_T1_0", "mmu-invalid-address"),
        ("mmu-invalid-address", "GPCCLIENT_GCC", "mmu-instruction-fetch"),
        ("mmu-use-after-unmap", "GPCCLIENT_GCC", "mmu-instruction-fetch"),
        ("mmu-null", "GPCCLIENT_GCC", "mmu-null"),
        ("mmu-permission", "GPCCLIENT_GCC", "mmu-permission"),
        ("mmu-invalid-address", "GR0_PBDMA", "pbdma-fault"),
        ("mmu-permission", "GR0_PBDMA", "pbdma-fault"),
    ],
)
def test_refine_mmu(before: str, client: str, after: str) -> None:
    assert tx.refine_mmu(before, mmu_text(0x1000, client)) == after


def test_explain_tells_what_the_row_says() -> None:
    text = tx.explain("sm-misaligned")
    row = tx.CLASSES["sm-misaligned"]
    assert text.startswith(f"sm-misaligned: {row.title}\n")
    for part in (row.recognised, row.scope.value, row.isolated, row.action, "13, 43"):
        assert part in text
    assert "Xids        none" in tx.explain("hang")


def test_explain_names_the_nearest_class() -> None:
    with pytest.raises(NotFoundError, match="did you mean 'sm-misaligned'"):
        tx.explain("sm-missaligned")
    with pytest.raises(NotFoundError, match="one of: control-death"):
        tx.explain("zzz")
