"""The log: two formats, levels, nothing hostile gets through, nothing that fails ends the daemon."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog

from mpsd import logs


@pytest.fixture(autouse=True)
def defaults_afterwards() -> Iterator[None]:
    yield
    structlog.reset_defaults()


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
    code = "import structlog, mpsd.logs; raise SystemExit(structlog.is_configured())"
    assert subprocess.run([sys.executable, "-c", code], timeout=50, check=False).returncode == 0
