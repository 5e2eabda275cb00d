"""A program that lost its GPU work says so in one line at its end. Other programs say nothing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.libcuda import test_failover as failover
from tests.libcuda.test_failover import Program, break_domain, move, stand_by
from tests.support.libcudas import DEADLINE_S
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain, until

post, copies, ask = failover.post, failover.copies, failover.ask
__all__ = ["ask", "backend", "copies", "domain", "post", "second"]

LINE = re.compile(
    r"mpsd: the GPU work of this program was lost at \d\d:\d\d:\d\d \(CUDA error 700\); "
    r"for the cause, run: mpsd-ctl faults\n"
)


def end(program: Program, status: int) -> str:
    """End the program with this status. Return what it wrote on stderr."""
    program.tell(f"sys.exit({status})")
    try:
        _, said = program.process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        program.process.kill()
        raise
    assert program.process.returncode == status
    return said


def lose(domain: Domain, post: Post, ask: Program) -> None:
    """Let the program meet the loss of its context."""
    post.greet()
    break_domain(domain)
    until(lambda: ask("gpu.sync()") == "700")


def test_a_program_that_fails_after_its_loss_says_so_once(domain: Domain, post: Post, ask: Program) -> None:
    lose(domain, post, ask)
    # Later errors are the same loss.
    assert ask("gpu.sync()") == "700"
    assert LINE.fullmatch(end(ask, 3))


def test_a_program_that_ends_well_says_nothing(domain: Domain, post: Post, ask: Program) -> None:
    lose(domain, post, ask)
    assert end(ask, 0) == ""


def test_a_program_that_lost_nothing_says_nothing(post: Post, ask: Program) -> None:
    post.greet()
    assert ask("gpu.sync()") == "0"
    assert end(ask, 3) == ""


@failover.both
def test_a_program_that_has_moved_says_nothing(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    until(lambda: ask("gpu.sync()") == "0")
    assert end(ask, 3) == ""


def test_a_forked_child_says_nothing(domain: Domain, post: Post, ask: Program) -> None:
    lose(domain, post, ask)
    ask("child = os.fork() or sys.exit(3)")
    assert ask("os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])") == "3"
    assert LINE.fullmatch(end(ask, 4)), "the child has written nothing before"


@pytest.mark.parametrize("how", ["2>&-", "2>/dev/full"])
def test_without_a_usable_stderr_the_status_stays(how: str, domain: Domain, post: Post, ask: Program) -> None:
    lose(domain, post, ask)
    ask("os.close(2)" if how == "2>&-" else "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)")
    assert end(ask, 3) == ""
