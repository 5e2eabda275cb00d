"""Messages of the vault's socket: one layout for compiler and Python; invalid messages are refused."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.base.text import gpu_uuid
from mpsd.vault import messages
from mpsd.vault.messages import Kind, Message, Status, WireError, pack, unpack

HEADER = Path(__file__).resolve().parents[2] / "clients" / "libcuda" / "src" / "vaultwire.h"
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
MESSAGES = st.builds(
    Message,
    st.sampled_from(Kind),
    U32,
    U64,
    U64,
    U64,
    U32,
    U32,
    st.binary(min_size=16, max_size=16).map(gpu_uuid),
    st.binary(min_size=32, max_size=32),
    st.text(st.characters(min_codepoint=1, max_codepoint=127), max_size=63),
    st.sampled_from(Status),
)


@given(MESSAGES, st.booleans())
def test_what_is_packed_is_unpacked(message: Message, answer: bool) -> None:
    assert unpack(pack(message, answer=answer), answer=answer) == message
    with pytest.raises(WireError):
        unpack(pack(message, answer=answer), answer=not answer)


@given(
    st.binary(max_size=400)
    | st.tuples(MESSAGES.map(pack), st.integers(0, 159), st.binary(max_size=9)).map(
        lambda given: given[0][: given[1]] + given[2] + given[0][given[1] + len(given[2]) :]
    )
)
def test_bytes_are_a_message_or_an_error(data: bytes) -> None:
    try:
        message = unpack(data)
    except WireError:
        return
    assert pack(message) == data


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_the_compiler_lays_it_out_the_same(tmp_path: Path) -> None:
    body = "".join(
        f'printf("%zu %zu\\n", offsetof(struct mpsd_vault_message, {f}), sizeof(m.{f}));'
        for f in messages.FIELDS
    )
    source = tmp_path / "layout.c"
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{HEADER}"\n'
        f"int main(void) {{ struct mpsd_vault_message m; {body} "
        f"return sizeof(m) != {messages.LAYOUT.size}; }}"
    )
    program = tmp_path / "layout"
    subprocess.run(["gcc", "-o", program, source], check=True, timeout=90)
    said = subprocess.run([program], check=True, capture_output=True, text=True, timeout=90).stdout
    found = [tuple(map(int, line.split())) for line in said.splitlines()]
    parts = re.findall(r"\d*[A-Za-z]", messages.LAYOUT.format[1:])
    sizes = [int(p[:-1] or 1) if p[-1] == "s" else {"I": 4, "H": 2, "Q": 8}[p[-1]] for p in split(parts)]
    assert found == [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def split(parts: list[str]) -> list[str]:
    """The format "2I" counts as two fields "I"."""
    return [p for part in parts for p in ([part] if part[-1] == "s" else [part[-1]] * int(part[:-1] or 1))]


def test_the_header_s_constants_are_these() -> None:
    text = HEADER.read_text()
    numbers = {name: int(value, 0) for name, value in re.findall(r"MPSD_VAULT_(\w+) = (\d+),", text)}
    assert numbers == {**Kind.__members__, **Status.__members__, "ANSWER": messages.ANSWER}
    defined = dict(re.findall(r"#define MPSD_VAULT_(\w+) (\w+)", text))
    assert (int(defined["MAGIC"].rstrip("u"), 0), int(defined["VERSION"])) == (
        messages.MAGIC,
        messages.VERSION,
    )
    rooms = (int(defined["NAME_ROOM"]), int(defined["TOKEN_ROOM"]))
    assert rooms == (messages.NAME_ROOM, messages.TOKEN_ROOM)
    assert int(defined["READS_FAR"]) == messages.READS_FAR
