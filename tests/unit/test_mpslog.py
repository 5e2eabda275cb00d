"""Log lines of several driver releases, and lines that are not log lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.mps import log
from mpsd.mps.log import Event, LogParser

CORPUS = Path(__file__).parents[1] / "data" / "nvidia-580"
EXPECTED = json.loads((CORPUS / "expected.json").read_text())


def events(lines: list[str]) -> list[Event]:
    parser = LogParser()
    return [parser.feed(line).event for line in lines]


@pytest.mark.parametrize(
    ("text", "event"),
    [
        ("Starting control daemon using socket /run/a b/control", log.ControlStarted("/run/a b/control")),
        ("CUDA MPS Control binary version: 13000", log.BinaryVersion(13000)),
        ("CUDA MPS Server for Linux/Unix. Binary version: 13000", log.BinaryVersion(13000)),
        ("NEW CLIENT 11801 from user 1000: Server already exists", log.NewClient(11801, 1000, False)),
        (
            "NEW CLIENT 0 from user 1000: Server is not ready, push client to pending list",
            log.NewClient(0, 1000, True),
        ),
        ("Starting new server 17 for user 1000", log.ServerStarted(17, 1000)),
        ("NEW SERVER 17: Ready", log.ServerReady(17)),
        ("Server 95 exited with status 1", log.ServerExited(95, 1)),
        ("Server encountered a fatal exception. Shutting down", log.FatalShutdown()),
        ("Cmd:terminate_client 17 33", log.AdminCommand("terminate_client 17 33")),
        ("Failed to start : invalid argument", log.StartFailed("invalid argument")),
        ("Status of client {33, 1} is ACTIVE", log.ClientStatus(33, 1, True)),
        ("Status of client {PID: 33, Context ID: 1} is INACTIVE", log.ClientStatus(33, 1, False)),
        ("Client {33, 1} exit", log.ClientExit(33, 1)),
        ("Client {PID: 33, Context ID: 1} exit", log.ClientExit(33, 1)),
        ("Receive command failed, assuming client exit", log.ClientDisconnected(None, None)),
        (
            "Client {PID: 33, Context ID: 1} failed to receive with status 806, assuming client exit",
            log.ClientDisconnected(33, 806, 1),
        ),
        (
            "Server failed to recevie command with status 806, assuming client {PID: 33, Context ID: 0} exit",
            log.ClientDisconnected(33, 806, 0),
        ),
        (
            "Client {PID: 33, Context ID: 1} exiting. Number of active client contexts is 1.",
            log.ClientExit(33, 1),
        ),
        (
            "Client {PID: 33, Context ID: 1} exiting. Worker is in reset. Number of contexts is 1.",
            log.ClientExit(33, 1),
        ),
        ("Client process 33 disconnected", log.ClientGone(33)),
        ("Client {PID: 33, Context: 1} encountered a fatal GPU error.", log.BlamedClient(33, 1)),
        ("Failed to accept client {PID: 33, Context ID: 0} with status 807", log.ClientRefused(33, 807)),
        (
            "Failed to accept new client. Maximum number of clients (48) reached.",
            log.ClientRefused(None, log.MAX_CLIENTS),
        ),
        ("Client termination succeeded.", log.Termination(True)),
        ("Client termination failed with invalid device context.", log.Termination(False)),
        (
            "Received new client request for {PID: -1333654781, Context ID: 0}",
            log.Routine("Received new client request for {PID: -1333654781, Context ID: 0}"),
        ),
        *(
            (text, log.Routine(text))
            for text in (
                'Unknown command "handling a fatal GPU error"',
                'Unknown command "Failed to start: x"',
            )
        ),
        ("Destroy server context on device 0", log.DeviceReset(0)),
        ("Creating server context on device 0 (Tesla T4)", log.ContextCreated(0)),
        ("Volta MPS: Client process disconnected", log.Routine("Volta MPS: Client process disconnected")),
        ("Something new in a later release", log.Unparsed("Something new in a later release")),
        ("", log.Routine("")),
    ],
)
@pytest.mark.parametrize(
    "prefix", ["[2026-02-06 09:34:17.770 Other   261] ", "[2021-12-19 16:22:21.847 Legacy Server     1] ", ""]
)
def test_one_line_one_event_whatever_its_tag(prefix: str, text: str, event: Event) -> None:
    assert LogParser().feed(prefix + text).event == event


def test_the_prefix_is_taken_apart() -> None:
    line = LogParser().feed("[2024-04-29 11:22:10.421 Legacy Server    73] NEW SERVER 9: Ready")
    assert (line.time, line.tag, line.writer) == ("2024-04-29 11:22:10.421", "Legacy Server", 73)
    assert line.text == "NEW SERVER 9: Ready"


def test_the_fault_block_spans_lines_of_one_writer() -> None:
    prefix = "[2026-11-01 10:00:00.000 Server   40] "
    control = "[2026-11-01 10:00:00.000 Control   30] "
    found = events(
        [
            prefix + "Server is handling a fatal GPU error.",
            prefix + "Status of client {PID: 51, Context ID: 1} is INACTIVE",
            prefix + "The following devices will be reset:",
            prefix + "0",
            "1",
            prefix + "The following clients have a sticky error set:",
            prefix + "51",
            control + "Cmd:get_client_list 40",
            control + "77",
            control + "UI closed",
            prefix + "52",
            prefix + "53 bananas",
            prefix + "54",
        ]
    )
    assert [event for event in found if not isinstance(event, log.Routine)] == [
        log.ServerFatal(),
        log.ClientStatus(51, 1, False),
        log.AffectedDevice(0),
        log.AffectedDevice(1),
        log.AffectedClient(51),
        log.AdminCommand("get_client_list 40"),
        log.AffectedClient(52),
        log.Unparsed("53 bananas"),
        log.Unparsed("54"),
    ]


def recorded(kind: str) -> tuple[LogParser, list[log.LogLine]]:
    parser = LogParser()
    return parser, [parser.feed(line) for line in (CORPUS / f"{kind}.log").read_text().splitlines()]


@pytest.mark.parametrize("kind", sorted(path.stem for path in CORPUS.glob("*.log")))
def test_every_line_that_driver_580_wrote_is_known(kind: str) -> None:
    parser, lines = recorded(kind)
    assert parser.lines == len(lines) > 20
    assert [line.text for line in lines if isinstance(line.event, log.Unparsed)] == []
    # Only answers of several lines continue without a prefix.
    assert all(
        line.writer and line.time and line.tag for line in lines if line.event != log.Routine(line.text)
    )


# A client that was terminated, has ended idle or failed an assertion ends no other client.
HARMLESS = {"assert", "clean_exit", "endless", "sigkill_idle"}


@pytest.mark.parametrize("kind", sorted(EXPECTED))
def test_the_recorded_fault_names_all_it_hit_and_nobody_as_its_cause(kind: str) -> None:
    expected = EXPECTED[kind]
    found = [line.event for line in recorded(kind)[1]]
    clients = {expected["survivor"], expected["offender"]}
    assert {event.pid for event in found if isinstance(event, log.NewClient)} >= clients
    assert log.ServerReady(expected["server"]) in found
    assert {event.pid for event in found if isinstance(event, log.ClientGone)} == clients
    hit = {event.pid for event in found if isinstance(event, log.AffectedClient)}
    assert (log.ServerFatal() in found) == bool(hit) == (kind not in HARMLESS)
    assert hit <= clients and (kind in HARMLESS or expected["survivor"] in hit)
    assert (log.AffectedDevice(0) in found) == (log.DeviceReset(0) in found) == (kind not in HARMLESS)


def test_the_client_that_the_server_blames_is_often_innocent() -> None:
    blamed = {
        kind: event.pid
        for kind in EXPECTED
        for line in recorded(kind)[1]
        if isinstance(event := line.event, log.BlamedClient)
    }
    innocent = {kind for kind, pid in blamed.items() if pid == EXPECTED[kind]["survivor"]}
    assert (len(blamed), len(innocent)) == (12, 8)
    assert {"store", "read_only", "pbdma", "sigkill_running"} <= innocent


def test_a_refused_client_shows_with_its_error() -> None:
    _, lines = recorded("in-fault")
    (refused,) = [line.event for line in lines if isinstance(line.event, log.ClientRefused)]
    assert refused.status == 807


def test_the_answer_to_a_command_is_routine_until_the_connection_ends() -> None:
    prefix = "[2026-11-01 10:00:00.000 Control   30] "
    texts = ["NEW UI", "Cmd:get_server_status 4", "DANCING", "UI closed", "DANCING"]
    found = events([prefix + text for text in texts])
    assert found == [
        log.Routine("NEW UI"),
        log.AdminCommand("get_server_status 4"),
        log.Routine("DANCING"),
        log.Routine("UI closed"),
        log.Unparsed("DANCING"),
    ]


def test_unknown_lines_are_counted() -> None:
    parser = LogParser()
    for line in ("NEW SERVER 9: Ready", "what", "[garbage", "9" * 5000):
        parser.feed(line)
    assert (parser.lines, parser.unparsed) == (4, 3)


@pytest.mark.parametrize(
    "text",
    [
        f"NEW CLIENT {log.PID_LIMIT + 1} from user 0: Server already exists",
        f"NEW CLIENT 5 from user {1 << 32}: Server already exists",
        f"NEW CLIENT {'9' * 5000} from user 0: active worker threads",
        f"Client {{PID: 0, Context ID: {1 << 64}}} exit",
        f"Client {{PID: 5, Context ID: {1 << 64}}} exit",
        f"Failed to accept client {{PID: 5, Context ID: 0}} with status {1 << 31}",
        f"Server 5 exited with status -{'1' * 21}",
        f"[2026-11-01 10:00:00.000 Server {log.PID_LIMIT + 1}] NEW SERVER 5: Ready",
    ],
)
def test_a_number_out_of_bounds_makes_its_line_unparsed(text: str) -> None:
    parser = LogParser()
    assert parser.feed(text).event == log.Unparsed(text)
    # Also where the line would be the answer to a command.
    parser.feed("[2026-11-01 10:00:00.000 Control 30] Cmd:get_client_list 40")
    assert isinstance(parser.feed(text).event, log.Unparsed)
    assert parser.unparsed == 2


def test_the_largest_numbers_are_taken() -> None:
    assert events([f"NEW CLIENT {log.PID_LIMIT} from user {(1 << 32) - 1}: Server already exists"]) == [
        log.NewClient(log.PID_LIMIT, (1 << 32) - 1, pending=False)
    ]
    assert events([f"Client {{PID: 1, Context ID: {(1 << 64) - 1}}} exit"]) == [
        log.ClientExit(1, (1 << 64) - 1)
    ]


def test_invented_writers_do_not_grow_the_memory() -> None:
    parser = LogParser()
    for writer in range(1, 5 * log.BLOCKS_KEPT):
        parser.feed(
            f"[2026-11-01 10:00:00.000 Server {writer}] The following clients have a sticky error set:"
        )
    assert len(parser._blocks) == log.BLOCKS_KEPT
    assert parser.feed(f"[2026-11-01 10:00:00.000 Server {writer}] 51").event == log.AffectedClient(51)


@given(st.lists(st.text(max_size=80), max_size=20))
def test_no_text_breaks_the_parser(lines: list[str]) -> None:
    parser = LogParser()
    for line in lines:
        parser.feed(line)
    assert parser.unparsed <= parser.lines == len(lines)
