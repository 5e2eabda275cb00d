"""Every parser of text that a client or its server can write takes time in proportion to the text."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpsd.base.errors import ControlError
from mpsd.limits.questions import claim
from mpsd.limits.values import Kind, said
from mpsd.limits.values import answer as read_answer
from mpsd.mps import answers, log
from mpsd.mps.log import LogParser
from mpsd.os import kmsg

SMALL, TIMES = 4 << 10, 8
PREFIX = "[2026-11-29 10:00:00.000 Server  4711] "
XID = "4,1,2,-;NVRM: Xid (PCI:0000:9A:00): 31, pid=4242, name="
WORDS = (
    *(words for words, _, _ in log._RULES),
    *log._ROUTINE_STARTS,
    *log._ROUTINE_WORDS,
    *(word for pair in log._ROUTINE_PAIRS for word in pair),
    "clients affected",
    "devices reset",
)
PIECES = (
    *sorted(set(WORDS)),
    *(" ", "\t", "1", "9", "0", "a", ":", ",", "{", "}", "\n", "\0", "é", "\u2028", "\u0663", "\\x20"),
    *(
        "client {PID: 1, Context ID: 1} ",
        "{PID: 1,",
        "{ 1 , ",
        "Context ID: ",
        "status 1 ",
        "[2026-11-29 10:00:00",
    ),
    *(
        "NEW CLIENT 1 from user ",
        "Server 1 exited with status -",
        ", Ch 1",
        ", name=",
        "pid='",
        "0x1_",
        "(PCI:",
    ),
    *("invalid process ", "cannot send ", "12.5%", "-", "%", "G "),
)


def feed(text: str) -> None:
    parser = LogParser()
    for line in (text, PREFIX + text):
        parser.feed(line)


def answer(text: str) -> None:
    for parse in (answers.pids, answers.server_state, answers.percentage, answers.priority):
        with contextlib.suppress(ControlError):
            parse(text)
    answers.terminated(text)
    answers.busy("get_server_status 1", text)
    answers.no_daemon(text)
    answers.already_running(text)
    with contextlib.suppress(ControlError):
        answers.accepted("quit", text)


def setting(text: str) -> None:
    with contextlib.suppress(ValueError):
        claim(text, ("GPU-0",))
    for kind in Kind:
        read_answer(kind, text)
        said(kind, text)


def record(text: str) -> None:
    for whole in (text, f"4,1,2,-;{text}", XID + text, text + XID):
        kmsg.parse_record(whole)


PARSERS = (feed, answer, setting, record)


def seconds(parse: Callable[[str], None], text: str) -> float:
    """Return the least processor time of three runs."""
    found = []
    for _ in range(3):
        began = time.process_time()
        parse(text)
        found.append(time.process_time() - began)
    return min(found)


def is_linear(parse: Callable[[str], None], start: str, piece: str, end: str) -> bool:
    """Return whether the time for eight times the text is nearer to eight times than to 64 times as long."""
    small = start + piece * (SMALL // len(piece)) + end
    large = start + piece * (SMALL * TIMES // len(piece)) + end
    return any(seconds(parse, large) < 3 * TIMES * seconds(parse, small) + 0.01 for _ in range(3))


@pytest.mark.parametrize("parse", PARSERS)
def test_a_repeated_piece_costs_time_in_proportion(parse: Callable[[str], None]) -> None:
    assert [piece for piece in PIECES if not is_linear(parse, "", piece, "x")] == []


@pytest.mark.parametrize("words", sorted(set(WORDS)))
def test_every_pattern_is_linear_before_and_behind_its_own_words(words: str) -> None:
    for piece in (" ", "1", f"{words} ", "client {PID: 1, Context ID: 1} ", "{ "):
        assert is_linear(feed, f"{words} ", piece, "x"), piece
        assert is_linear(feed, "", piece, words), piece


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(PARSERS),
    st.sampled_from(("", *PIECES)),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join),
    st.sampled_from(("", *PIECES)),
)
def test_no_repetition_costs_more_than_proportional_time(
    parse: Callable[[str], None], start: str, piece: str, end: str
) -> None:
    assert is_linear(parse, start, piece, end)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(PARSERS), st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=20)), max_size=30)
)
def test_no_text_raises(parse: Callable[[str], None], pieces: list[str]) -> None:
    parse("".join(pieces))


@pytest.mark.parametrize("digits", ["9" * 5000, "0" * 5000, "99999999999999999999999", "\u0663" * 9])
@pytest.mark.parametrize("parse", PARSERS)
def test_no_number_raises(parse: Callable[[str], None], digits: str) -> None:
    for text in (
        digits,
        f"{digits} {digits}",
        f"NEW CLIENT {digits} from user {digits}",
        f"Server {digits} exited with status -{digits}",
        f"Client {{PID: {digits}, Context ID: {digits}}} exit",
        f"Failed to accept client {{PID: 1, Context ID: 1}} with status {digits}",
        f"[2026-11-29 10:00:00.{digits} Server {digits}] NEW SERVER {digits}: Ready",
        f"Destroy server context on device {digits}",
        f"CUDA MPS Control binary version: {digits}",
        f"{digits},1,{digits},-;NVRM: Xid (PCI:{digits}:44:00): {digits}, pid={digits}, name=x, Ch 1",
        f"4,1,2,-;NVRM: Xid (PCI:0000:44:00): {digits}, pid={digits}, name=x, Ch 1",
        f"{digits}%",
        f"{digits}G",
    ):
        parse(text)
