"""Messages of the fail-over socket: one layout for compiler and Python; invalid messages are refused."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.base.model import ExceptionOwner, FailoverMode, Reclaimable, ReplayMode, SnapshotBudget
from mpsd.core import effects as fx
from mpsd.daemon.failover import order_of
from mpsd.failover import messages
from mpsd.failover.messages import Kind, Message, WireError, pack, unpack
from tests.support.core import process

HEADER = Path(__file__).resolve().parents[2] / "clients" / "libcuda" / "src" / "failoverwire.h"
U64 = st.integers(0, 2**64 - 1)


def words(room: int) -> st.SearchStrategy[str]:
    text = st.text(st.characters(min_codepoint=1, exclude_categories=["Cs"]), max_size=room)
    return text.filter(lambda t: len(t.encode()) < room)


MESSAGES = st.builds(
    Message,
    st.sampled_from(Kind),
    st.sampled_from(FailoverMode),
    U64,
    st.tuples(*[U64] * messages.VALUES),
    words(messages.PATH_ROOM),
    words(messages.TEXT_ROOM),
)


@given(MESSAGES)
def test_what_is_packed_is_unpacked(message: Message) -> None:
    assert unpack(pack(message)) == message


@given(
    st.binary(max_size=400)
    | st.tuples(MESSAGES.map(pack), st.integers(0, 311), st.binary(max_size=9)).map(
        lambda given: given[0][: given[1]] + given[2] + given[0][given[1] + len(given[2]) :]
    )
)
def test_bytes_are_a_message_or_an_error(data: bytes) -> None:
    try:
        message = unpack(data)
    except WireError:
        return
    assert pack(message) == data


def test_a_long_text_is_cut_between_characters_and_a_long_path_refused() -> None:
    message = unpack(pack(Message(Kind.STAYED, text="\u20ac" * 100)))
    assert message.text == "\u20ac" * 42
    with pytest.raises(ValueError, match="too long"):
        pack(Message(Kind.STANDBY, path="/" + "x" * messages.PATH_ROOM))


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_the_compiler_lays_it_out_the_same(tmp_path: Path) -> None:
    body = "".join(
        f'printf("%zu %zu\\n", offsetof(struct mpsd_failover_message, {f}), sizeof(m.{f}));'
        for f in messages.FIELDS
    )
    source = tmp_path / "layout.c"
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{HEADER}"\n'
        f"int main(void) {{ struct mpsd_failover_message m; {body} "
        f"return sizeof(m) != {messages.LAYOUT.size}; }}"
    )
    program = tmp_path / "layout"
    subprocess.run(["gcc", "-o", program, source], check=True, timeout=90)
    said = subprocess.run([program], check=True, capture_output=True, text=True, timeout=90).stdout
    found = [tuple(map(int, line.split())) for line in said.splitlines()]
    sizes = [4, 2, 2, 4, 4, 8, 8 * messages.VALUES, messages.PATH_ROOM, messages.TEXT_ROOM]
    assert found == [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def test_the_header_s_constants_are_these() -> None:
    text = HEADER.read_text()
    numbers = {name: int(value, 0) for name, value in re.findall(r"MPSD_FAILOVER_(\w+) = (\d+),", text)}
    modes = {mode.name: number for number, mode in enumerate(messages.MODES)}
    spared = {f"SPARED_{name}": value for name, value in Reclaimable.__members__.items()}
    whose = {f"WHOSE_{name}": value for name, value in ExceptionOwner.__members__.items()}
    budgets = {f"BUDGET_{name}": value for name, value in SnapshotBudget.__members__.items()}
    assert numbers == {**Kind.__members__, **modes, **ReplayMode.__members__, **spared, **whose, **budgets}
    defined = dict(re.findall(r"#define MPSD_FAILOVER_(\w+) (\w+)", text))
    assert (int(defined["MAGIC"].rstrip("u"), 0), int(defined["VERSION"])) == (
        messages.MAGIC,
        messages.VERSION,
    )
    rooms = tuple(int(defined[name]) for name in ("PATH_ROOM", "TEXT_ROOM", "VALUES"))
    assert rooms == (messages.PATH_ROOM, messages.TEXT_ROOM, messages.VALUES)
    flags = ("TAKES_FENCED", "GIVES", "BUDGETS")
    assert {name: int(defined[name]) for name in flags} == {name: getattr(messages, name) for name in flags}


@pytest.mark.parametrize(
    ("effect", "values"),
    [
        (fx.Move(process(7), 2, "a fault"), (0, 0, 0, 0, 0)),
        (fx.Move(process(7), 2, "drained", planned=True, again=ReplayMode.AGAIN), (1, 1, 0, 0, 0)),
        (
            fx.Move(process(7), 2, "a fault", again=ReplayMode.IN_TURN, exception_logged=False),
            (0, 2, 1, 0, 0),
        ),
        (fx.Move(process(7), 2, "a fault", again=ReplayMode.IN_TURN, may_go_on=True), (0, 2, 0, 1, 0)),
        (fx.Move(process(7), 2, "a fault", again=ReplayMode.IN_TURN, hurries=True), (0, 2, 0, 0, 1)),
    ],
)
def test_an_order_to_move_has_its_values_in_the_order_of_the_header(
    effect: fx.Move, values: tuple[int, ...]
) -> None:
    order = order_of(effect)
    assert (order.kind, order.generation, order.text) == (Kind.MOVE, 2, effect.why)
    assert order.values == values
