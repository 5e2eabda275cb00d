"""Collecting the texts that users see: Python, C, shell, files of settings, pages."""

from __future__ import annotations

from tests.support.texts import c_texts, comment_texts, page_texts, python_texts, shell_texts

MODULE = '''"""What argparse shows."""
import argparse
EPILOG = "an epilog here"
RULE = 5
"""a comment on RULE"""
def run(x: int) -> "list[int]":
    """a docstring here"""
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG)
    parser.add_argument("--one-word", help="a help" f" of {x} words")
class Keys:
    deadline: int = _key(5, "a configuration comment", unit="ms")
'''


def test_python_texts() -> None:
    found = {(text.kind, text.text) for text in python_texts(MODULE, "a.py")}
    assert found == {
        ("help", "What argparse shows."),
        ("help", "an epilog here"),
        ("help", "a help of {} words"),
        ("config", "a configuration comment"),
    }
    assert "What" not in str(python_texts(MODULE.replace("__doc__", "None"), "a.py"))


def test_a_module_without_argparse_has_messages() -> None:
    source = 'raise ValueError(f"no {x:>5} " "domain is here", key="key")\nlog(help=f"{x:>5}" "two words")\n'
    found = [(text.line, text.kind, text.text) for text in python_texts(source, "a.py")]
    assert sorted(found) == [(1, "message", "no {} domain is here"), (2, "help", "{}two words")]


def test_a_program_as_a_string_is_no_text() -> None:
    assert python_texts('PROGRAM = """\nimport os\nprint("spare")\n"""\n', "a.py") == []


def test_c_texts() -> None:
    source = (
        '#include "a file.h"\n/* "not this" */ // "nor this"\nchar c = \'"\';\n'
        'say("it\'s %d of %" PRIu64 " bytes,"\n  " \\"quoted\\"\\n", "key", "two words");'
    )
    found = [(text.line, text.text) for text in c_texts(source, "a.c")]
    assert found == [(4, 'it\'s {} of {} bytes, "quoted"\n'), (5, "two words")]


def test_shell_texts() -> None:
    source = (
        "#!/bin/sh\n# Usage of it\n\n# don't: a comment\necho \"two $words\" 'and more'; run one\n"
        "cat <<EOF\nhere is text\nEOF\n"
    )
    found = [(text.line, text.kind, text.text) for text in shell_texts(source, "a")]
    assert found == [
        (2, "help", "Usage of it\n"),
        (5, "message", "two {}"),
        (5, "message", "and more"),
        (6, "message", "here is text\n"),
    ]


def test_comment_texts() -> None:
    found = comment_texts("[Unit]\nDescription=What it is\n# one\n# two\nType=notify\n", "a.service")
    assert [(text.line, text.text) for text in found] == [(2, "What it is"), (3, "one\ntwo\n")]


def test_page_texts() -> None:
    source = (
        "# Head `code`\n\nA [link](to/some) of\ntwo lines.\n```\nfenced code\n```\n- one *item*\n"
        "- another\n  item\n\n    indented code\n\n| a cell | `x` |\n| --- | --- |\n"
    )
    found = [(text.line, text.kind, text.text) for text in page_texts(source, "README.md")]
    assert found == [
        (1, "heading", "Head {}"),
        (3, "page", "A link of two lines."),
        (8, "page", "one item"),
        (9, "page", "another item"),
        (14, "page", "a cell"),
    ]
