"""Text of other users' processes reaches a terminal as plain text on one line."""

from __future__ import annotations

from mpsd.base import limits
from mpsd.base.text import printable
from mpsd.wire import address


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[31m\n\tb\u202e\u2028é") == "a\\x1b[31m\\n\\tb\\u202e\\u2028é"
    assert printable("\udc80") == "\\udc80"
    assert printable("plain é") == "plain é"


def test_long_text_is_cut() -> None:
    assert printable("x" * 300, 10) == "x" * 10 + "..."
    assert printable("x" * 10, 10) == "x" * 10
    assert len(printable("x" * 100_000)) < 300


def test_the_client_keeps_to_the_daemons_limit() -> None:
    # wire needs the standard library alone, so it has its own constant.
    assert address.MAX_PATH_BYTES == limits.SOCKET_PATH_LIMIT
