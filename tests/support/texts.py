"""Collect the texts that users see, from the sources: pages, help, configuration comments, messages.

Nothing is imported or run. A string constant is a text if it has a space: keys, event fields and paths
have none. Docstrings are texts only where argparse shows them (`description=__doc__`).
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PYTHON = (
    "mpsd",
    "clients/mpsd_client",
    "clients/libcuda/mpsd_libcuda",
    "faultinject",
    "kmod_patches/kmod",
    "clients/libcuda/libcuda_build",
    "clients/examples",
)
C = ("clients/libcuda/src", "clients/libcuda/standin", "kmod_patches/src")
SCRIPTS = ("scripts", "kmod_patches")
PAGES = ("mpsd", "clients", "faultinject", "kmod_patches", "scripts", "evidence", "docs", "tests")
GENERATED = {"reports", "evidence"}
"""Folders in which the harness writes all pages but README.md: its strings are checked instead."""

HELP_ARGUMENTS = frozenset({"help", "description", "epilog", "title"})
CONFIG_ARGUMENTS = frozenset({"doc"})
CONFIG_KEY = "_key"
HOLE = "{}"
"""The place of a value, a format or inline code in a text."""


@dataclass(frozen=True, slots=True)
class Text:
    file: str
    line: int
    kind: str
    """page, heading, help, config, message (Python, C and shell), comment (of an installed file)."""
    text: str

    @property
    def is_prose(self) -> bool:
        return self.kind in ("page", "heading", "help", "config", "comment")


def collect(root: Path) -> list[Text]:
    """Return every text that a user of the tree at `root` may see."""
    texts: list[Text] = []
    for folder in PYTHON:
        for path in sorted((root / folder).rglob("*.py")):
            texts += python_texts(path.read_text(), _name(root, path))
    for folder in C:
        for path in sorted([*(root / folder).rglob("*.c"), *(root / folder).rglob("*.h")]):
            texts += c_texts(path.read_text(), _name(root, path))
    for path in scripts(root):
        texts += shell_texts(path.read_text(), _name(root, path))
    for path in sorted((root / "scripts" / "packaging").rglob("*.*")):
        if path.suffix not in (".md", ".py", ".sh") and path.is_file():
            texts += comment_texts(path.read_text(), _name(root, path))
    for path in pages(root):
        texts += page_texts(path.read_text(), _name(root, path))
    return texts


def scripts(root: Path) -> list[Path]:
    """Return the shell scripts, known by their first line."""
    found = [path for folder in SCRIPTS for path in sorted((root / folder).rglob("*")) if path.is_file()]
    return [path for path in found if path.suffix in ("", ".sh") and _is_shell(path)]


def pages(root: Path) -> list[Path]:
    found = [path for folder in PAGES for path in sorted((root / folder).rglob("*.md"))]
    written = [path for path in found if path.name == "README.md" or not GENERATED & set(path.parts)]
    return [root / "README.md", *written]


def _name(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def _is_shell(path: Path) -> bool:
    with path.open("rb") as file:
        return re.match(rb"#!.*\b(ba)?sh\b", file.readline()) is not None


# Python


def python_texts(source: str, file: str) -> list[Text]:
    """Return the constants of a module that have a space, and the docstring that argparse shows.

    A module that imports argparse hands its help texts around: all its texts count as help.
    """
    tree = ast.parse(source)
    nodes = list(_walk(tree))
    kinds = _kinds(tree, nodes)
    kind = "help" if re.search(r"^import argparse$", source, re.MULTILINE) else "message"
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            text = _joined(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            text = node.value
        else:
            continue
        if id(node) not in skipped and is_text(text):
            texts.append(Text(file, node.lineno, kinds.get(id(node), kind), text))
    if "=__doc__" in source:
        texts.append(Text(file, 1, "help", ast.get_docstring(tree) or ""))
    return texts


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what ast.walk yields but for names' contexts, in half its time."""
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, list):
                stack += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                stack.append(value)


def is_text(text: str) -> bool:
    return " " in text.strip() and not _is_code(text)


def _is_code(text: str) -> bool:
    """Programs kept as strings: Python, C, PTX, shell."""
    code = (
        r"^\s*(import \w|from [\w.]+ import|#include|\.version|\.visible|def \w+\(|set -e|extern )|;\n.*;\n"
    )
    return "\n" in text and re.search(code, text, re.MULTILINE) is not None


def _joined(node: ast.JoinedStr) -> str:
    parts = (part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
    return "".join(str(part) for part in parts)


def _kinds(tree: ast.Module, nodes: list[ast.AST]) -> dict[int, str]:
    """Return "help" or "config" for the string nodes given as such, by id of the node."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    kinds: dict[int, str] = {}

    def mark(value: ast.expr, kind: str) -> None:
        if isinstance(value, ast.Name) and value.id in constants:
            value = constants[value.id]
        kinds.update({id(inner): kind for inner in ast.walk(value)})

    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == CONFIG_KEY:
            for value in node.args[1:]:
                mark(value, "config")
        for keyword in node.keywords:
            if keyword.arg in HELP_ARGUMENTS:
                mark(keyword.value, "help")
            elif keyword.arg in CONFIG_ARGUMENTS:
                mark(keyword.value, "config")
    return kinds


# C

_C_TOKEN = re.compile(
    r"""
    (?P<comment>/\*.*?\*/|//[^\n]*)
    |(?P<include>\#[ \t]*include[^\n]*)
    |"(?P<string>(?:[^"\\\n]|\\.)*)"
    |(?P<char>'(?:[^'\\\n]|\\.)*')
    |(?P<macro>\bPRI[a-zA-Z0-9]+\b)
    |(?P<space>\s+)
    |(?P<other>[^"'/\#\sP]+|.)
    """,
    re.VERBOSE | re.DOTALL,
)


def c_texts(source: str, file: str) -> list[Text]:
    """Return the string literals that have a space; adjacent ones are one."""
    texts: list[Text] = []
    parts: list[str] = []
    start = 0
    line = 1
    for token in _C_TOKEN.finditer(source):
        if token.lastgroup == "string":
            start = start if parts else line
            parts.append(token["string"].replace("\\n", "\n").replace('\\"', '"').replace("\\t", "\t"))
        elif token.lastgroup not in ("comment", "space", "macro") and parts:
            texts.append(Text(file, start, "message", _without_formats("".join(parts))))
            parts = []
        line += token[0].count("\n")
    return [text for text in texts if is_text(text.text)]


def _without_formats(text: str) -> str:
    return re.sub(r"%[-+0#]*[\d*]*(?:\.[\d*]+)?(?:hh|h|ll|l|z|j|t)?[diouxXcspfeg]?", HOLE, text)


# Shell and files of settings


def shell_texts(source: str, file: str) -> list[Text]:
    """Return the comment at the head of a script, its quoted strings and here-documents with a space."""
    texts = []
    head = re.match(r"#!.*\n((?:#.*\n)+)", source)
    if head:
        texts.append(Text(file, 2, "help", _uncommented(head[1])))
    here = re.compile(r"<<-?\s*'?(?P<end>[A-Z]+)'?[^\n]*\n(?P<here>.*?\n)\s*(?P=end)\n", re.DOTALL)
    token = re.compile(
        r"(?P<comment>(?:^|(?<=\s))\#[^\n]*)"
        r"|'(?P<single>[^']*)'"
        r'|"(?P<double>(?:[^"\\]|\\.)*)"'
        r"|\\."
        r"|" + here.pattern,
        re.DOTALL | re.MULTILINE,
    )
    for found in token.finditer(source):
        text = found["single"] or found["double"] or found["here"]
        if text and is_text(text):
            line = source.count("\n", 0, found.start()) + 1
            texts.append(Text(file, line, "message", re.sub(r"\$\{\w+[^}]*\}|\$\w+", HOLE, text)))
    return texts


def comment_texts(source: str, file: str) -> list[Text]:
    """Return the blocks of comments and the descriptions of units and other files of settings."""
    texts = []
    for found in re.finditer(r"(?:^#.*\n)+|^Description=(?P<said>.*)", source, re.MULTILINE):
        line = source.count("\n", 0, found.start()) + 1
        texts.append(Text(file, line, "comment", found["said"] or _uncommented(found[0])))
    return texts


def _uncommented(block: str) -> str:
    return re.sub(r"^# ?", "", block, flags=re.MULTILINE)


# Pages


def page_texts(source: str, file: str) -> list[Text]:
    """Return headings, cells of tables, items of lists and paragraphs; code becomes a hole."""
    texts: list[Text] = []
    block: list[str] = []
    start = 0
    fence = ""

    def end() -> None:
        if block:
            texts.append(Text(file, start, "page", inline(" ".join(block))))
            block.clear()

    for number, line in enumerate(source.splitlines(), 1):
        bare = line.strip()
        if fence or bare.startswith(("```", "~~~")):
            if not fence:
                fence = bare[:3]
            elif bare.startswith(fence):
                fence = ""
            end()
        elif not bare or (line.startswith("    ") and not block):
            end()
        elif bare.startswith("#"):
            end()
            texts.append(Text(file, number, "heading", inline(bare.lstrip("# "))))
        elif bare.startswith("|"):
            end()
            cells = [cell for cell in inline(bare).strip("|").split("|") if re.search(r"\w", cell)]
            texts += [Text(file, number, "page", cell.strip()) for cell in cells]
        else:
            item = re.match(r"(?:[-*+]|\d+\.)\s+", bare)
            if item:
                end()
                bare = bare[item.end() :]
            start = start if block else number
            block.append(bare)
    end()
    return texts


def inline(text: str) -> str:
    """Return the text without inline code, addresses of links and emphasis."""
    text = re.sub(r"(`+)(?:.+?)\1", HOLE, text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\*\*|(?<!\w)[*_](?=\w)|(?<=\w)[*_](?!\w)|<!--.*?-->", "", text)


# Sentences

_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!vs\.)(?<!cf\.)[)\"']?\s+")


def sentences(text: Text) -> Iterator[str]:
    """Yield the sentences. A blank line, an item of a list and an indented line end one too."""
    for part in re.split(r"\n\s*\n|\n(?=\s*[-*] )|\n(?=[ \t]{2,})", text.text):
        for sentence in _SENTENCE_END.split(" ".join(part.split())):
            if sentence:
                yield sentence


def words(sentence: str) -> int:
    return sum(1 for word in sentence.split() if re.search(r"\w|\{\}", word))


def code_texts(source: str, file: str) -> list[Text]:
    """Return the docstrings and the comments of a Python module; a block of comment lines is one text."""
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            texts.append(Text(file, getattr(node, "lineno", 1), "docstring", text))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("#!", "# type:", "# noqa")):
            texts.append(Text(file, token.start[0], "code comment", token.string.lstrip("# ")))
    return texts
