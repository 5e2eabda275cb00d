"""Values of limits, the commands that read and set them, and the limits that each slot is to have."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from mpsd.base.model import Gpu
from mpsd.base.quantities import mebibytes
from mpsd.config.schema import Limits
from mpsd.limits.book import LimitBook, Owner
from mpsd.limits.questions import Question, claim, questions
from mpsd.limits.values import Key, Kind, agrees, answer, said, value_of

GPUS = ("GPU-a", "GPU-b")
PERCENTAGE, PRIORITY = Key(Kind.PERCENTAGE), Key(Kind.PRIORITY)


def gpu(index: int, uuid: str) -> Gpu:
    return Gpu(index, uuid, "Simulated", "0000:00:00.0", 1 << 30)


HERE = (gpu(0, "GPU-a"), gpu(1, "GPU-b"))
ON_A, ON_B, ON_BOTH = Owner(("GPU-a",), 7), Owner(("GPU-b",), 7), Owner(("GPU-b", "GPU-a"), 7)


def memory(uuid: str) -> Key:
    return Key(Kind.MEMORY, uuid)


# -- values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Kind.PERCENTAGE, "50", "50"),
        (Kind.PERCENTAGE, "50.0", "50"),
        (Kind.PERCENTAGE, "33.333", "33.333"),
        (Kind.PERCENTAGE, "50%", None),
        (Kind.PERCENTAGE, "0", None),
        (Kind.PERCENTAGE, "0.0001", "0.0001"),
        (Kind.PERCENTAGE, "0.00001", None),
        (Kind.PERCENTAGE, "100.1", None),
        (Kind.PERCENTAGE, "1e1", None),
        (Kind.PERCENTAGE, "nan", None),
        (Kind.PERCENTAGE, "4\N{ARABIC-INDIC DIGIT THREE}", None),
        (Kind.PRIORITY, "1", "1"),
        (Kind.PRIORITY, "2", None),
        (Kind.PRIORITY, "-1", None),
        (Kind.MEMORY, "512M", "512M"),
        (Kind.MEMORY, "2G", "2048M"),
        (Kind.MEMORY, "512m", "512M"),
        (Kind.MEMORY, "1.5G", None),
        (Kind.MEMORY, "0G", None),
        (Kind.MEMORY, "1T", None),
        (Kind.MEMORY, "512", None),
        (Kind.MEMORY, "999999999999G", None),
    ],
)
def test_a_command_says_a_plain_value_or_only_the_control_daemon_can_tell(
    kind: Kind, text: str, value: str | None
) -> None:
    assert said(kind, text) == value


@pytest.mark.parametrize(
    ("kind", "reply", "text", "value"),
    [
        (Kind.PERCENTAGE, "25.0\n", "25.0", "25"),
        (Kind.PERCENTAGE, "100.5", "", ""),
        (Kind.PERCENTAGE, "nan", "", ""),
        (Kind.PERCENTAGE, "Server 27516 not found", "", ""),
        (Kind.PERCENTAGE, "Invalid server PID 85", "", ""),
        (Kind.PERCENTAGE, "Active thread percentage: 40.0%", "40.0", "40"),
        (Kind.PRIORITY, "get_default_client_priority failed with status 1", "", ""),
        (Kind.MEMORY, "Cannot set a limit of 2G", "", ""),
        (Kind.PRIORITY, "Default client priority is 1\n", "1", "1"),
        (Kind.PRIORITY, "2", "", ""),
        (Kind.MEMORY, "2G\n", "2G", "2048M"),
        (Kind.MEMORY, "512M", "512M", "512M"),
        (Kind.MEMORY, "512", "", ""),
        (Kind.MEMORY, "0M", "", ""),
        (Kind.MEMORY, "", "", ""),
        (Kind.MEMORY, "Invalid device identifier format: 99", "", ""),
    ],
)
def test_an_answer_has_a_value_or_none(kind: Kind, reply: str, text: str, value: str) -> None:
    assert answer(kind, reply) == text
    assert not text or value_of(kind, text) == value


@pytest.mark.parametrize(
    ("kind", "value", "answered", "agreed"),
    [
        (Kind.PERCENTAGE, "40", "40.0", True),
        (Kind.PERCENTAGE, "33.333", "33.3", True),
        (Kind.PERCENTAGE, "40", "100.0", False),
        (Kind.PRIORITY, "1", "1", True),
        (Kind.PRIORITY, "1", "0", False),
        (Kind.MEMORY, "2048M", "2G", True),
        (Kind.MEMORY, "1044M", "1G", True),
        (Kind.MEMORY, "1044M", "1024M", False),
        (Kind.MEMORY, "512M", "1G", False),
        (Kind.MEMORY, "512M", "", False),
    ],
)
def test_answers_are_rounded_as_the_control_daemon_rounds_them(
    kind: Kind, value: str, answered: str, agreed: bool
) -> None:
    assert agrees(kind, value, answered) == agreed


@pytest.mark.parametrize(("text", "mib"), [("512M", 512), ("2G", 2048), ("1.5G", 1536), ("1g", 1024)])
def test_the_configuration_takes_decimals_that_are_whole_mebibytes(text: str, mib: int) -> None:
    assert mebibytes(text) == mib


@pytest.mark.parametrize("text", ["1.0001G", "0.5M", "1T", "512", "2GiB", "-1G", "", "50%", "9" * 12 + "G"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a whole number of MiB"):
        mebibytes(text)


# -- commands -------------------------------------------------------------------------------------------


def test_a_domain_is_asked_for_each_limit_and_the_name_that_counts_comes_last() -> None:
    found = questions(("GPU-a",), server=True)
    assert [q.read(5) for q in found] == [
        "get_default_active_thread_percentage",
        "get_default_client_priority",
        "get_default_device_pinned_mem_limit GPU-a",
        "get_default_device_pinned_mem_limit 0",
        "get_active_thread_percentage 5",
        "get_device_pinned_mem_limit 5 GPU-a",
        "get_device_pinned_mem_limit 5 0",
    ]
    assert found[-1].write(5, "2048M") == "set_device_pinned_mem_limit 5 0 2048M"
    assert found[0].write(5, "50") == "set_default_active_thread_percentage 50"
    assert len({q.name for q in found}) == len(found)


@pytest.mark.parametrize("command", ["", "quit", "get_server_list", "terminate_client 1 2", "SET_DEFAULT x"])
def test_other_commands_set_no_limit(command: str) -> None:
    assert claim(command, GPUS) is None


@pytest.mark.parametrize(
    ("command", "question", "value"),
    [
        ("set_default_active_thread_percentage 40", Question(PERCENTAGE), "40"),
        ("set_active_thread_percentage 5 50%", Question(PERCENTAGE, "", True), None),
        ("set_default_client_priority 1", Question(PRIORITY), "1"),
        ("set_default_device_pinned_mem_limit 1 2G", Question(memory("GPU-b"), "1"), "2048M"),
        ("set_default_device_pinned_mem_limit GPU-a 1.5G", Question(memory("GPU-a"), "GPU-a"), None),
        ("set_device_pinned_mem_limit 5 0 3G", Question(memory("GPU-a"), "0", True), "3072M"),
    ],
)
def test_an_ordinal_is_the_gpu_that_it_means_in_its_domain(
    command: str, question: Question, value: str | None
) -> None:
    found = claim(command, GPUS)
    assert found is not None and (found.question, found.value) == (question, value)


@pytest.mark.parametrize(
    "command",
    [
        "set_default_active_thread_percentage",
        "set_default_active_thread_percentage 40 50",
        "set_default_device_pinned_mem_limit 0",
        "set_default_device_pinned_mem_limit 2 1G",
        "set_default_device_pinned_mem_limit -1 1G",
        "set_default_device_pinned_mem_limit GPU-c 1G",
        "set_device_pinned_mem_limit 0 1G",
        "set_default_client_priority" + " " * 300 + "1",
    ],
)
def test_commands_that_no_control_daemon_of_the_domain_takes_are_refused(command: str) -> None:
    with pytest.raises(ValueError, match=r"wrong number of arguments|this domain has no GPU"):
        claim(command, GPUS)


# -- the limits of slots ----------------------------------------------------------------------------------


def test_an_index_in_the_configuration_is_that_of_the_node_and_the_uuid_is_the_better_name() -> None:
    book = LimitBook(Limits(25.0, 1, MappingProxyType({"GPU-a": "1.5G", "0": "512M", "1": "2g"})), HERE)
    common = {PERCENTAGE: "25", PRIORITY: "1"}
    assert book.wanted(ON_A) == {**common, memory("GPU-a"): "1536M"}
    assert book.wanted(ON_B) == {**common, memory("GPU-b"): "2048M"}
    assert book.wanted(ON_BOTH) == {**common, memory("GPU-a"): "1536M", memory("GPU-b"): "2048M"}


def test_a_limit_set_by_hand_is_that_of_one_slot() -> None:
    book = LimitBook(Limits(25.0), HERE)
    assert book.learn(ON_A, PERCENTAGE, "40")
    assert not book.learn(ON_A, PERCENTAGE, "40")
    assert book.learn(ON_B, memory("GPU-b"), "512M")
    assert book.wanted(ON_A) == {PERCENTAGE: "40", PRIORITY: "0"}
    assert book.wanted(ON_B) == {PERCENTAGE: "25", PRIORITY: "0", memory("GPU-b"): "512M"}
    assert book.wanted(Owner(("GPU-a",), 8)) == {PERCENTAGE: "25", PRIORITY: "0"}
    # The value of the configuration, said by hand, ends the exception.
    assert book.learn(ON_A, PERCENTAGE, "25")
    assert [row["gpus"] for row in book.rows()] == [["GPU-b"]]


def test_limits_set_by_hand_outlast_a_restart_and_a_changed_configuration() -> None:
    book = LimitBook(Limits(25.0, 1), HERE)
    assert book.rows() == []
    book.learn(ON_A, PRIORITY, "0")
    book.learn(ON_A, memory("GPU-a"), "1044M")
    later = LimitBook(Limits(50.0, 1), HERE)
    later.restore(book.rows())
    assert later.wanted(ON_A) == {PERCENTAGE: "50", PRIORITY: "0", memory("GPU-a"): "1044M"}
    assert later.rows() == book.rows()


@pytest.mark.parametrize(
    "limit",
    [
        {"kind": "quit", "gpu": "", "value": "1"},
        {"kind": "client_priority", "gpu": "", "value": "9"},
        {"kind": "client_priority", "gpu": "GPU-a", "value": "1"},
        {"kind": "device_pinned_mem_limit", "gpu": "GPU-b", "value": "1024M"},
    ],
)
def test_a_state_file_with_anything_else_is_refused(limit: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        LimitBook(Limits(), HERE).restore([{"gpus": ["GPU-a"], "uid": 7, "limits": [limit]}])


def test_limits_set_by_hand_are_written_as_an_earlier_version_reads_them() -> None:
    book, shared = LimitBook(Limits(25.0), HERE), Owner(("GPU-a",), None)
    assert book.old_rows() == {}
    book.learn(ON_A, PERCENTAGE, "40")
    book.learn(ON_A, memory("GPU-a"), "1044M")
    book.learn(shared, PRIORITY, "1")
    book.learn(ON_BOTH, memory("GPU-b"), "512M")
    rows = book.old_rows()
    assert rows == {
        "7": ["set_default_active_thread_percentage 40", "set_default_device_pinned_mem_limit 0 1044M"],
        "everybody": ["set_default_client_priority 1"],
    }
    again = LimitBook(Limits(25.0), HERE)
    again.restore_old(rows, [ON_A, shared])
    assert again.by_hand() == {owner: book.by_hand()[owner] for owner in (ON_A, shared)}
    # An earlier version has one value for all slots of a user.
    book.learn(ON_B, PERCENTAGE, "60")
    assert book.old_rows()["7"][0] == "set_default_active_thread_percentage 60"


def test_the_commands_of_an_earlier_version_count_for_the_slots_that_it_applied_them_to() -> None:
    book = LimitBook(Limits(), HERE)
    old = {
        "7": ["set_default_active_thread_percentage 40", "set_default_device_pinned_mem_limit GPU-b 1G"],
        "everybody": ["set_default_device_pinned_mem_limit 0 2G"],
    }
    shared = Owner(("GPU-a",), None)
    book.restore_old(old, [ON_A, ON_B, shared])
    assert book.wanted(ON_A) == {PERCENTAGE: "40", PRIORITY: "0"}
    assert book.wanted(ON_B)[memory("GPU-b")] == "1024M"
    assert book.wanted(shared)[memory("GPU-a")] == "2048M"
    refused: tuple[dict[str, list[str]], ...] = (
        {"7": ["quit"]},
        {"7": ["set_default_client_priority 9"]},
        {"x": []},
    )
    for wrong in refused:
        with pytest.raises(ValueError):
            book.restore_old(wrong, [ON_A])
