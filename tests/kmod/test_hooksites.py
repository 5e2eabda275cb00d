"""The part of a disassembly that is a function's own, and the part that only says where things are."""

from __future__ import annotations

from kmod.hooksites import functions_of

ONE = """
x.o:     file format elf64-x86-64

<first>:
    mov    $0x0,%rdi
    1e: R_X86_64_32S        .rodata.str1.1+0x10
    ret

<second>:
    ret
"""


def test_functions_are_told_apart() -> None:
    assert list(functions_of(ONE)) == ["first", "second"]
    assert functions_of(ONE)["second"] == ["ret"]


def test_where_a_string_lies_makes_no_difference_and_an_instruction_does() -> None:
    moved = ONE.replace("+0x10", "+0x20").replace("1e: R", "2a: R")
    assert functions_of(moved) == functions_of(ONE)
    assert functions_of(ONE.replace("$0x0", "$0x1"))["first"] != functions_of(ONE)["first"]
