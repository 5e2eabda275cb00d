"""The log: two formats, levels; hostile text is escaped, and no failure ends the daemon."""

from __future__ import annotations

import ast
import errno
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from mpsd.base import logs
from mpsd.wire.messages import Gap


@pytest.fixture(autouse=True)
def defaults_afterwards() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_no_field_of_a_log_line_is_overwritten_by_the_log_itself() -> None:
    package = Path(logs.__file__).parent.parent
    taken = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log."):
                names = {keyword.arg for keyword in node.keywords}
                taken += [f"{path}:{node.lineno}"] if names & {"event", "level", "timestamp"} else []
    assert taken == []


def test_json_lines_carry_fields_and_level() -> None:
    stream = io.StringIO()
    logs.configure("auto", "info", stream)
    structlog.get_logger().warning("domain faulted", domain="d1", pid=7, gpus=["GPU-a"], ratio=0.5, none=None)
    structlog.get_logger().debug("unseen")
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry.pop("timestamp").endswith("Z")
    assert entry == {
        "event": "domain faulted",
        "level": "warning",
        "domain": "d1",
        "pid": 7,
        "gpus": ["GPU-a"],
        "ratio": 0.5,
        "none": None,
    }


HOSTILE = "python\x1b[2J\r\nFAKE line\u202e\x9b\udc80"


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_untrusted_text_stays_on_its_line(log_format: str) -> None:
    stream = io.StringIO()
    logs.configure(log_format, "info", stream, colors=False)
    structlog.get_logger().info(
        HOSTILE, command=HOSTILE, nested={HOSTILE: [HOSTILE]}, other=ValueError(HOSTILE)
    )
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text[:-1].isprintable()
    assert "FAKE line" in text


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_members_of_an_enumeration_are_written_as_their_values(log_format: str) -> None:
    stream = io.StringIO()
    logs.configure(log_format, "info", stream, colors=False)
    structlog.get_logger().info("audit", proof=[Gap.NONE, Gap.FORGOTTEN], one=Gap.FORGOTTEN)
    text = stream.getvalue()
    assert "Gap" not in text and text.count(Gap.FORGOTTEN.value) == 2


def test_long_text_is_cut() -> None:
    stream = io.StringIO()
    logs.configure("json", "info", stream)
    structlog.get_logger().info("x" * 100000)
    assert len(stream.getvalue()) < 3000


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_that_cannot_be_written_is_dropped_and_counted() -> None:
    output = logs.configure("json", "info", FullDisk())
    structlog.get_logger().error("lost")
    assert output.lost > 0


def test_importing_sets_nothing_up() -> None:
    code = "import structlog, mpsd.base.logs; raise SystemExit(structlog.is_configured())"
    assert subprocess.run([sys.executable, "-c", code], timeout=90, check=False).returncode == 0


def test_lines_that_strangers_cause_are_few_and_their_number_is_told() -> None:
    stream, now = io.StringIO(), [0.0]
    logs.configure("json", "info", stream)
    repeated = logs.Repeated(structlog.get_logger(), interval_s=60.0, clock=lambda: now[0])
    for number in range(1000):
        repeated.warning("refused", "size", number=number)
    repeated.info("refused", "order")
    now[0] = 61.0
    repeated.warning("refused", "size", number=1000)
    said = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(row.get("number"), row.get("left_out")) for row in said] == [
        (0, None),
        (None, None),
        (1000, 999),
    ]


def test_kinds_of_such_lines_are_bounded() -> None:
    repeated = logs.Repeated(structlog.get_logger())
    logs.configure("json", "error", io.StringIO())
    for kind in range(3 * logs.MAX_KINDS):
        repeated.info("refused", kind)
    assert len(repeated._said) == logs.MAX_KINDS
