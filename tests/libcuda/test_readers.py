"""The read list (MPSD_FAILOVER_READS): writing it by validation, rejecting other files, and checksums of
pages."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.libcuda.test_exact import gate
from tests.libcuda.test_failover import copies, post, stand_by, started
from tests.libcuda.test_still import (
    COPY,
    LAUNCH,
    MEMORY,
    MIB,
    Run,
    kernels,
    known,
    reads,
    saved,
    validate,
    validated,
    validations,
)
from tests.support import moving
from tests.support.gate import Gate
from tests.support.libcudas import Libraries
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain

__all__ = ["backend", "copies", "domain", "gate", "known", "post", "reads", "second", "validations"]

LINE = "copy 1f 3 0000000000000002 0000000000000001\n"
BAD = {
    "nothing": ("", 1),
    "another head": ("mpsd reads 2\n" + LINE, 1),
    "too few": ("mpsd reads 1\n" + LINE + "copy 1f 3 0000000000000002\n", 3),
    "too many": ("mpsd reads 1\n" + LINE[:-1] + " 1\n", 2),
    "no number": ("mpsd reads 1\n" + LINE.replace("1f", "-1f"), 2),
    "no words": ("mpsd reads 1\n" + LINE.replace(" 3 ", " 0 "), 2),
    "too many words": ("mpsd reads 1\n" + LINE.replace(" 3 ", " 5000 "), 2),
    "not so many digits": ("mpsd reads 1\n" + LINE.replace(" 3 ", " 65 "), 2),
    "no digits": ("mpsd reads 1\n" + LINE.replace("0002", "000x"), 2),
}


def run_with(libraries: Libraries, domain: Domain, post: Post, reads: str) -> str:
    with started(libraries, domain, post, MPSD_FAILOVER="exact", MPSD_FAILOVER_READS=reads) as ask:
        post.greet(moving.EXACT)
        assert ask("gpu.sync()") == "0"
        return ask.end()


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_none_is_told(
    libraries: Libraries, domain: Domain, post: Post, reads: Path, name: str
) -> None:
    text, line = BAD[name]
    reads.write_text(text)
    said = run_with(libraries, domain, post, str(reads))
    assert f"MPSD_FAILOVER_READS: {reads}: line {line} is invalid; snapshots" in said


def test_a_file_that_is_not_there_is_told(
    libraries: Libraries, domain: Domain, post: Post, reads: Path
) -> None:
    said = run_with(libraries, domain, post, str(reads))
    assert f"MPSD_FAILOVER_READS: {reads}: No such file or directory; snapshots" in said
    assert "MPSD_FAILOVER_READS: not an absolute path; snapshots" in run_with(
        libraries, domain, post, "reads"
    )


def test_what_one_run_has_seen_written_another_does_not_take_back(
    libraries: Libraries, domain: Domain, post: Post, known: Path
) -> None:
    """A later run does not withdraw a parameter that was seen written; two pointers into one allocation
    both count."""
    validate(
        libraries, domain, post, known, "go('copy', to, to + 4096, 8)", "gpu.run('add', to + 4096, 8, 1)"
    )
    # The copy moved only zeros, so no word of it was seen to change.
    assert kernels(known) == {"copy": (3, 1), "store": (1, 0), "add": (0, 1)}
    within, add = "go('copy', to, to + 4096, 8)", "gpu.run('add', to + 4096, 8, 1)"
    validate(libraries, domain, post, known, within, add)
    # The copy moved only zeros, so no word of it was seen to change.
    assert kernels(known) == {"copy": (3, 1), "store": (1, 0), "add": (0, 1)}
    validate(libraries, domain, post, known, within, add, within, "go('store', to, 0)")
    assert kernels(known) == {"copy": (3, 3), "store": (1, 1), "add": (0, 1)}
    validate(libraries, domain, post, known, "go('copy', to, weights, 8)")
    assert kernels(known) == {"copy": (3, 3), "store": (1, 1), "add": (0, 1)}
    assert [path.name for path in known.parent.iterdir()] == [known.name]


def test_kernels_of_a_graph_are_seen(libraries: Libraries, domain: Domain, post: Post, reads: Path) -> None:
    with validated(libraries, domain, post, reads) as ask:
        ask("s = gpu.made('cuStreamCreate', 1); g = ctypes.c_uint64()")
        assert ask("gpu.code('cuStreamBeginCapture_v2', s, 2)") == "0"
        assert (
            ask("go('copy', to, weights, 8, stream=s), gpu.code('cuStreamEndCapture', s, ctypes.byref(g))")
            == "(0, 0)"
        )
        ask("graph = gpu.made('cuGraphInstantiateWithFlags', g, 0)")
        assert ask("gpu.code('cuGraphLaunch', graph, 0), gpu.sync()") == "(0, 0)"
        ask.end()
    assert kernels(reads) == {"copy": (2, 1)}


def test_what_is_not_looked_at_may_have_been_written(
    libraries: Libraries, domain: Domain, post: Post, reads: Path
) -> None:
    """Work that validation does not observe counts as a write: a kernel with host memory, and one beside
    an open host callback."""
    pinned = "go('copy', gpu.made('cuMemHostAlloc', 4096, 0), weights, 8)"
    held = "gpu.host('a', holds=True), go('store', to, 0), gpu.go('a')"
    validate(libraries, domain, post, reads, pinned, f"[{held}] and 0")
    assert kernels(reads) == {"copy": (0, 2), "store": (0, 1)}


def test_what_is_written_is_there_when_the_program_is_killed(
    libraries: Libraries, domain: Domain, post: Post, reads: Path
) -> None:
    with validated(libraries, domain, post, reads) as ask:
        assert ask(f"{COPY}, gpu.run('add', weights, 8, 1)") == "(0, 0)"
        ask.process.kill()
        ask.process.wait()
    assert kernels(reads) == {"copy": (2, 1), "add": (0, 1)}


@pytest.mark.parametrize("text", ["something else\n", "mpsd reads 1\nno line\n"])
def test_validation_leaves_a_file_that_is_none(
    libraries: Libraries, domain: Domain, post: Post, reads: Path, text: str
) -> None:
    reads.write_text(text)
    said = validate(libraries, domain, post, reads, "go('copy', to, weights, 8)")
    assert "is invalid; the file is not changed" in said
    assert reads.read_text() == text


def test_where_it_cannot_be_written_that_is_told(
    libraries: Libraries, domain: Domain, post: Post, tmp_path: Path
) -> None:
    said = validate(libraries, domain, post, tmp_path / "none" / "reads", "go('copy', to, weights, 8)")
    assert "none/reads: No such file or directory; the results of validation are not saved" in said


def test_another_build_of_a_kernel_is_not_meant(
    libraries: Libraries, domain: Domain, second: Domain, post: Post, gate: Gate, copies: Path, known: Path
) -> None:
    lines = [line.split(" ") for line in known.read_text().splitlines()[1:]]
    others = [" ".join([line[0], f"{int(line[1], 16) ^ 1:x}", *line[2:]]) for line in lines]
    known.write_text("\n".join(["mpsd reads 1", *others]) + "\n")
    with started(libraries, domain, post, MPSD_FAILOVER="exact", MPSD_FAILOVER_READS=str(known)) as ask:
        run = Run(ask, post.greet(moving.EXACT))
        ask(LAUNCH)
        ask(MEMORY)
        stand_by(run.line, second, copies)
        run.rest()
        assert saved(run, domain, gate) == 12 * MIB
        assert ask.end() == ""


BITS = (1 << 64) - 1


def summed(one: int, two: int, place: int) -> int:
    """Return the contribution of two words to a page's checksum, computed from the PTX text of pages.c."""
    source = (Path(__file__).resolve().parents[2] / "clients/libcuda/src/exact/pages.c").read_text()
    loop = source[source.index("ld.volatile.global.v2.u64") : source.index("add.u64 %sum, %sum, %two")]
    values = {"%one": one, "%two": two, "%place": place}
    for name, to, *operands in re.findall(r"(\S+) (%\w+), (%\w+), (%\w+|0x\w+|\d+);", loop):
        a, b = (values[word] if word in values else int(word, 0) for word in operands)
        values[to] = {
            "add.u64": lambda a, b: a + b,
            "mul.lo.u64": lambda a, b: a * b,
            "shr.u64": lambda a, b: a >> b,
            "xor.b64": lambda a, b: a ^ b,
        }[name](a, b) & BITS
    return values["%two"]


@pytest.mark.parametrize("bit", [0, 31, 34, 62, 63])
@pytest.mark.parametrize("which", [0, 1])
def test_two_changes_of_a_page_do_not_make_up_for_one_another(bit: int, which: int) -> None:
    """Two changes of one bit in two words of a page do not cancel out in its checksum, whatever the words
    hold."""
    drawn = random.Random(bit)
    for _ in range(500):
        words = [[drawn.choice([0, drawn.getrandbits(64)]) for _ in range(2)] for _ in range(2)]
        places = drawn.sample(range(0, 2 * MIB, 16), 2)
        before = sum(summed(*pair, place) for pair, place in zip(words, places, strict=True))
        for pair in words:
            pair[which] ^= 1 << bit
        after = sum(summed(*pair, place) for pair, place in zip(words, places, strict=True))
        assert (before - after) & BITS
