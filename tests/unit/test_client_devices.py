"""GPUs by every name, on nodes of 1, 2 and 4 GPUs: the right GPU, or a refusal that names the variable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from mpsd_client import MpsdError
from mpsd_client.joining.devices import (
    GIVEN,
    NUMBERS,
    ORDER,
    VISIBLE,
    NodeGpu,
    Request,
    missing_note,
    outside,
    requested,
    visible,
)
from mpsd_client.joining.present import present_gpus

UUIDS = [f"GPU-{digit * 8}-{digit * 4}-{digit * 4}-{digit * 4}-{digit * 12}" for digit in "abcd"]
ANY = None
SIZES = (1, 2, 4)


def node(size: int, *, alike: bool = True) -> list[NodeGpu]:
    return [NodeGpu(n, uuid, "H200" if alike or n else "L4") for n, uuid in enumerate(UUIDS[:size])]


def gpus(environ: Mapping[str, str], size: int, present: Sequence[int] = ()) -> list[int] | str | None:
    """Return the indices of the GPUs that the environment names, None for any, or the refusal."""
    try:
        found = requested(environ, node(size), [UUIDS[n] for n in present]).gpus
    except MpsdError as error:
        assert error.remedy and any(name in error.message for name in environ), error
        return "refused"
    return None if found is None else [UUIDS.index(uuid) for uuid in found]


REFUSED = "refused"
# Each row: the value, and the GPUs that it means on nodes of 1, 2 and 4 GPUs.
CONTAINER = [
    ("0", ANY, [0], [0]),
    ("1", REFUSED, [1], [1]),
    ("3", REFUSED, REFUSED, [3]),
    ("0,1", REFUSED, ANY, [0, 1]),
    ("1,0", REFUSED, ANY, [1, 0]),
    (" 1 , 0 ", REFUSED, ANY, [1, 0]),
    (UUIDS[0], ANY, [0], [0]),
    (UUIDS[1], REFUSED, [1], [1]),
    (f"{UUIDS[2]},{UUIDS[1]}", REFUSED, REFUSED, [2, 1]),
    ("GPU-bbbb", REFUSED, [1], [1]),
    ("GPU-", ANY, REFUSED, REFUSED),
    ("all", ANY, ANY, ANY),
    ("", ANY, ANY, ANY),
    ("none", [], [], []),
    ("void", ANY, REFUSED, REFUSED),
    ("nvidia.com/gpu=0", ANY, [0], [0]),
    ("nvidia.com/gpu=1", REFUSED, [1], [1]),
    ("nvidia.com/gpu=gpu1", REFUSED, [1], [1]),
    (f"nvidia.com/gpu={UUIDS[1]}", REFUSED, [1], [1]),
    (f"runtime.nvidia.com/gpu={UUIDS[0]}", ANY, [0], [0]),
    ("nvidia.com/gpu=all", ANY, ANY, ANY),
    ("nvidia.com/gpu=0,nvidia.com/gpu=1", REFUSED, ANY, [0, 1]),
    ("nvidia.com/gpu=0:1", REFUSED, REFUSED, REFUSED),
    ("nvidia.com/gpu=mig1:0", REFUSED, REFUSED, REFUSED),
    ("0:1", REFUSED, REFUSED, REFUSED),
    ("MIG-4711", REFUSED, REFUSED, REFUSED),
    ("/var/run/nvidia-container-devices", REFUSED, REFUSED, REFUSED),
    ("other.com/gpu=0", REFUSED, REFUSED, REFUSED),
    ("all,1", REFUSED, REFUSED, REFUSED),
    ("0,7", REFUSED, REFUSED, REFUSED),
]


@pytest.mark.parametrize("row", CONTAINER, ids=[row[0] or "empty" for row in CONTAINER])
def test_names_of_container_runtimes(row: tuple[str, object, object, object]) -> None:
    value, *expected = row
    assert [gpus({GIVEN: value}, size) for size in SIZES] == expected


PROGRAM = [
    ("0", [0], [0], [0]),
    ("1", REFUSED, [1], [1]),
    ("1,0", REFUSED, [1, 0], [1, 0]),
    ("0,3,1", [0], [0], [0, 3, 1]),
    ("0,-1,1", [0], [0], [0]),
    ("0,0", [0], [0], [0]),
    (" 1", REFUSED, [1], [1]),
    (UUIDS[1], REFUSED, [1], [1]),
    ("GPU-bb,GPU-aa", REFUSED, [1, 0], [1, 0]),
    ("0,GPU-bb", [0], [0, 1], [0, 1]),
    ("", [], [], []),
    ("-1", [], [], []),
    ("NoDevFiles", [], [], []),
    ("MIG-4711", REFUSED, REFUSED, REFUSED),
    ("0,MIG-4711", [0], [0], [0]),
    ("9", REFUSED, REFUSED, REFUSED),
]


@pytest.mark.parametrize("row", PROGRAM, ids=[row[0] or "empty" for row in PROGRAM])
def test_names_of_cuda(row: tuple[str, object, object, object]) -> None:
    value, *expected = row
    assert [gpus({VISIBLE: value}, size) for size in SIZES] == expected
    assert [gpus({VISIBLE: value, GIVEN: "all"}, size) for size in SIZES] == expected


@pytest.mark.parametrize(
    ("given", "number", "expected"),
    [
        ("3", "0", [3]),
        ("3", "1", REFUSED),
        ("3,1", "0", [1]),
        ("3,1", "1,0", [3, 1]),
        (UUIDS[2], "0", [2]),
        ("nvidia.com/gpu=2", "0", [2]),
        ("2", UUIDS[2], [2]),
        ("void", "0", REFUSED),
        ("void", UUIDS[2], [2]),
        ("none", "0", REFUSED),
    ],
)
def test_numbers_in_a_container_count_its_own_gpus(given: str, number: str, expected: object) -> None:
    assert gpus({GIVEN: given, VISIBLE: number}, 4) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, [1, 2]),
        ({GIVEN: "void"}, [1, 2]),
        ({GIVEN: "all"}, [1, 2]),
        ({GIVEN: "2"}, [2]),
        ({GIVEN: "0"}, REFUSED),
        ({GIVEN: "void", VISIBLE: "0"}, [1]),
        ({VISIBLE: "1"}, [2]),
        ({VISIBLE: "2"}, REFUSED),
    ],
)
def test_device_files_tell_which_gpus_a_container_has(environ: dict[str, str], expected: object) -> None:
    assert gpus(environ, 4, present=[1, 2]) == expected


def test_device_files_of_all_gpus_or_of_another_machine_say_nothing() -> None:
    assert gpus({}, 2, present=[0, 1]) is ANY
    assert gpus({GIVEN: "void"}, 1, present=[3]) is ANY
    assert gpus({GIVEN: "void"}, 2, present=[3]) == REFUSED


def test_numbers_of_unlike_gpus_count_in_an_order_that_only_cuda_knows() -> None:
    mixed = node(2, alike=False)
    with pytest.raises(MpsdError, match=f"{VISIBLE}=1 counts in CUDA's own order") as refused:
        requested({VISIBLE: "1"}, mixed)
    assert refused.value.remedy.startswith(f"set {ORDER}=PCI_BUS_ID")
    assert requested({VISIBLE: "1", ORDER: "PCI_BUS_ID"}, mixed).gpus == (UUIDS[1],)
    assert requested({VISIBLE: UUIDS[1]}, mixed).gpus == (UUIDS[1],)
    assert requested({GIVEN: "1"}, mixed).gpus == (UUIDS[1],), "container runtimes count as nvidia-smi does"
    assert requested({GIVEN: "1", VISIBLE: "0"}, mixed).gpus == (UUIDS[1],), "one GPU has one order"


def given(environ: Mapping[str, str], size: int, domain: Sequence[int]) -> dict[str, str | None]:
    return visible(requested(environ, node(size)), environ, [UUIDS[n] for n in domain], node(size))


@pytest.mark.parametrize(
    ("value", "size", "domain", "expected"),
    [
        # Numbers stay numbers. They count in the domain.
        ("0", 1, [0], {VISIBLE: "0"}),
        ("0", 2, [0], {VISIBLE: "0"}),
        ("1", 2, [1], {VISIBLE: "0", NUMBERS: UUIDS[1]}),
        ("1", 2, [0, 1], {VISIBLE: "1"}),
        ("1,0", 2, [0, 1], {VISIBLE: "1,0"}),
        ("1", 2, [1, 0], {VISIBLE: "0", NUMBERS: f"{UUIDS[1]},{UUIDS[0]}"}),
        ("3,1", 4, [1, 3], {VISIBLE: "1,0", NUMBERS: f"{UUIDS[1]},{UUIDS[3]}"}),
        ("1,0", 2, [1], {VISIBLE: "0", NUMBERS: UUIDS[1]}),
        # UUIDs stay as they are while they all belong to the domain.
        ("GPU-bb", 2, [1], {}),
        (UUIDS[1], 2, [1], {}),
        ("GPU-bb,GPU-aa", 2, [1], {VISIBLE: UUIDS[1]}),
        ("GPU-bb,GPU-bb", 2, [1], {VISIBLE: UUIDS[1]}),
        ("0,GPU-bb", 2, [0, 1], {VISIBLE: f"{UUIDS[0]},{UUIDS[1]}"}),
        ("", 2, [0], {}),
        ("-1", 2, [0], {}),
    ],
)
def test_the_form_of_the_user_stays(
    value: str, size: int, domain: list[int], expected: dict[str, str | None]
) -> None:
    assert given({VISIBLE: value}, size, domain) == expected


def test_a_program_that_names_none_sees_those_of_its_domain() -> None:
    assert given({}, 2, [1]) == {VISIBLE: UUIDS[1]}
    assert given({}, 1, [0]) == given({}, 2, [0, 1]) == {}
    assert given({GIVEN: "1"}, 2, [1]) == {VISIBLE: UUIDS[1]}
    assert given({GIVEN: "none"}, 2, [1]) == {VISIBLE: ""}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("extra", [{}, {GIVEN: "all"}])
def test_a_second_run_inside_the_first_gets_the_same_gpus(size: int, extra: dict[str, str]) -> None:
    for number in range(size):
        first = {VISIBLE: str(number), **extra}
        once = {k: v for k, v in (first | given(first, size, [number])).items() if v is not None}
        assert requested(once, node(size)).gpus == (UUIDS[number],)
        twice = {k: v for k, v in (once | given(once, size, [number])).items() if v is not None}
        assert once == twice


def test_numbers_beyond_those_of_the_domain_are_refused_inside_its_environment() -> None:
    environ = {VISIBLE: "1", NUMBERS: UUIDS[3]}
    with pytest.raises(MpsdError, match="CUDA_VISIBLE_DEVICES=1 counts in the 1 GPU") as refused:
        requested(environ, node(4))
    assert NUMBERS in refused.value.remedy
    fresh = {VISIBLE: UUIDS[2], NUMBERS: UUIDS[3]}
    assert given(fresh, 4, [2]) == {NUMBERS: None}, "the list of an earlier domain is unset"


def test_a_list_from_another_machine_says_nothing() -> None:
    environ = {VISIBLE: "0", NUMBERS: "GPU-of-another-machine"}
    assert requested(environ, node(2)).gpus == (UUIDS[0],)
    assert given(environ, 2, [0]) == {VISIBLE: "0", NUMBERS: None}


def test_outside_mps_the_same_gpus_are_named_by_uuid() -> None:
    assert outside({VISIBLE: "0", NUMBERS: UUIDS[3]}) == {VISIBLE: UUIDS[3], NUMBERS: None}
    assert outside({VISIBLE: "1"}) == outside({}) == {}
    assert outside({VISIBLE: "1"}, "2") == {VISIBLE: "2", ORDER: "PCI_BUS_ID"}


def test_a_note_tells_of_gpus_beyond_the_domain() -> None:
    both = Request((UUIDS[0], UUIDS[1]), VISIBLE)
    (note,) = missing_note(both, [UUIDS[1]])
    assert note.startswith("CUDA_VISIBLE_DEVICES names 2 GPUs") and UUIDS[1] in note
    assert missing_note(both, UUIDS) == missing_note(Request(), UUIDS) == []


def test_present_gpus_are_those_with_a_device_file(tmp_path: Path) -> None:
    assert present_gpus(tmp_path) == frozenset()
    for minor, uuid in enumerate(UUIDS[:3]):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{minor}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t NVIDIA\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        )
    (tmp_path / "dev").mkdir()
    for minor in (0, 2):
        (tmp_path / f"dev/nvidia{minor}").touch()
    assert present_gpus(tmp_path) == {UUIDS[0], UUIDS[2]}
    (folder / "information").write_text("GPU UUID: \t GPU-????????\nDevice Minor: \t 2\n")
    assert present_gpus(tmp_path) == frozenset(), "the driver does not show them yet"
