"""The client's own encoder of the vault's messages agrees with the daemon's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.base.errors import UsageError
from mpsd.base.text import gpu_uuid
from mpsd.core.vault import valid_name
from mpsd.vault import messages
from mpsd_client import _vaultwire as ours
from mpsd_client.vault import token_of

CLIENTS = Path(__file__).resolve().parents[2] / "clients"
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
FIELDS = st.fixed_dictionaries(
    {
        "sequence": U32,
        "number": U64,
        "size": U64,
        "address": U64,
        "index": U32,
        "count": U32,
        "token": st.binary(min_size=32, max_size=32),
        "name": st.text(st.characters(min_codepoint=1, max_codepoint=127), max_size=63),
    }
)


@given(
    st.sampled_from(ours.Kind),
    st.sampled_from(ours.Status),
    st.binary(min_size=16, max_size=16),
    FIELDS,
    st.booleans(),
)
def test_both_ends_write_and_read_the_same(
    kind: ours.Kind, status: ours.Status, gpu: bytes, fields: dict[str, int], answer: bool
) -> None:
    said = ours.Message(kind, status=status, gpu=gpu, **fields)  # type: ignore[arg-type]
    theirs = messages.Message(
        messages.Kind(kind),
        status=messages.Status(status),
        gpu=gpu_uuid(gpu),
        **fields,  # type: ignore[arg-type]
    )
    assert ours.pack(said, answer=answer) == messages.pack(theirs, answer=answer)
    assert ours.unpack_answer(messages.pack(theirs, answer=True)) == said


def test_the_numbers_are_the_daemon_s() -> None:
    assert ours.Kind.__members__.items() <= messages.Kind.__members__.items()
    assert ours.Status.__members__.items() <= messages.Status.__members__.items()
    mine = (ours.MAGIC, ours.VERSION, ours.ANSWER, ours.NAME_ROOM, ours.TOKEN_ROOM, ours.LAYOUT.format)
    assert mine == (
        messages.MAGIC,
        messages.VERSION,
        messages.ANSWER,
        messages.NAME_ROOM,
        messages.TOKEN_ROOM,
        messages.LAYOUT.format,
    )


@given(st.binary(max_size=200) | st.binary(min_size=160, max_size=160))
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        ours.unpack_answer(data)


@given(st.text(max_size=70) | st.sampled_from(["model-7", "7", "x" * 63, "x" * 64, "a b", "ä"]))
def test_names_are_judged_as_the_daemon_does(name: str) -> None:
    assert ours.valid_name(name) == valid_name(name)


def test_a_token_is_filled_up_and_never_cut() -> None:
    """Two tokens with the same first bytes would be one owner if they were cut."""
    assert token_of({}) == messages.NO_TOKEN
    assert token_of({"MPSD_VAULT_TOKEN": "secret"}) == b"secret" + bytes(26)
    assert token_of({"MPSD_VAULT_TOKEN": "x" * 32}) == b"x" * 32
    with pytest.raises(UsageError, match="MPSD_VAULT_TOKEN has 33 bytes; the limit is 32"):
        token_of({"MPSD_VAULT_TOKEN": "x" * 33})


IMPORT = """
import json, sys
import mpsd_client
alone = "ctypes" in sys.modules
maps = open("/proc/self/maps").read()
missing = [name for name in mpsd_client.__all__ if not hasattr(mpsd_client, name)]
foreign = {m.split(".")[0] for m in sys.modules} - set(sys.stdlib_module_names) - {"mpsd_client", "mpsd"}
now = open("/proc/self/maps").read()
cuda = [line.split()[-1] for line in (maps + now).splitlines() if "libcuda" in line]
print(json.dumps([alone, missing, sorted(foreign), cuda]))
"""


def test_importing_it_loads_no_cuda_and_nothing_foreign(tmp_path: Path) -> None:
    """All exported names can be imported, and ctypes is not loaded before a buffer is needed."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", IMPORT],
        env={"PYTHONPATH": f"{CLIENTS}:{CLIENTS.parent}"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    alone, missing, foreign, cuda = json.loads(done.stdout)
    assert (alone, missing, cuda) == (False, [], [])
    assert [name for name in foreign if not name.startswith("_") and name != "__main__"] == []
