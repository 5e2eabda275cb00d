"""Plain words for users: what pages, help, errors, logs, status and configuration comments may not say.

tests/support/texts.py collects the texts. Each rule has a sample on which it fires and one on which it
does not. To fix a finding, say what happens with a noun as the subject, in one fact per sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.support.texts import HOLE, Text, code_texts, collect, sentences, words

ROOT = Path(__file__).resolve().parent.parent
MAX_WORDS = 30
MAX_SHOWN = 40
OPENING_RULE = "opening"
LENGTH_RULE = "long sentence"


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    pattern: str
    use: str
    bad: tuple[str, ...]
    good: tuple[str, ...]


_ACCESS = r"(?:access|accesses|store|stores|load|loads|write|writes|read|reads)"
_PROCESS = r"(?:clients?|servers?|process(?:es)?|programs?|domains?|daemons?|contexts?|peers?)"

BANNED = (
    Rule(
        "spare",
        r"\bspar(?:es?|ed|ing)\b",
        "standby domain, standby context",
        ("no spare is ready", "the spares of d1", "the server is spared"),
        ("no standby domain is ready", "a sparse mapping", "set {} to false"),
    ),
    Rule("in waiting", r"\bin waiting\b", "standby domain", ("a domain in waiting",), ("waiting for d1",)),
    Rule(
        "second one", r"\bsecond one\b", "standby domain", ("it keeps a second one",), ("after one second",)
    ),
    Rule(
        "misdeed",
        r"\bmisdeeds?\b",
        "out-of-bounds access, fault",
        ("a misdeed of 4711",),
        ("an out-of-bounds access by 4711",),
    ),
    Rule(
        "stray as a noun",
        rf"\bstrays\b|\bstray\b(?!(?: [\w{{}}-]+){{0,2}} {_ACCESS}\b)",
        "stray access, unattributed Xid",
        ("three strays", "the stray was recorded", "a stray of 8 bytes"),
        ("a stray access", "stray 8-byte device writes", "astray"),
    ),
    Rule(
        "exception of an SM",
        r"\bexceptions? (?:of|in|on) (?:an? |the |its |one |their )?SMs?\b",
        "SM exception",
        ("an exception of an SM", "exceptions of the SMs", "exceptions of SMs"),
        ("an SM exception",),
    ),
    Rule(
        "put out",
        r"\bput(?:s|ting)?(?: [\w{}'-]+){0,3} out\b",
        "evict",
        ("mpsd puts the client out", "it was put out", "putting it out", "puts all its clients out"),
        ("mpsd evicts the client", "put the file in place", "timed out"),
    ),
    Rule(
        "executable graph",
        r"\bexecutable graphs?\b",
        "CUgraphExec",
        ("an executable graph",),
        ("a CUgraphExec", "an executable file"),
    ),
    Rule(
        "function of the host",
        r"\bfunctions? of the host\b",
        "host callback",
        ("functions of the host",),
        ("a host callback",),
    ),
    Rule(
        "step aside",
        r"\bstep(?:s|ped|ping)? aside\b",
        "pass-through, or what the program runs without",
        ("stepping aside: the GPU is drained", "the proxy steps aside"),
        ("the proxy passes every call through",),
    ),
    Rule(
        "willing",
        r"\b(?:un)?willing\w*",
        "fail-over participant, protected",
        ("two are willing", "an unwilling client", "its willingness"),
        ("two participants",),
    ),
    Rule(
        "go on elsewhere",
        r"\b(?:go|goes|going|went|gone) on elsewhere\b",
        "fail over, move",
        ("it went on elsewhere", "clients go on elsewhere"),
        ("the client failed over", "the rounds go on"),
    ),
    Rule(
        "moved away",
        r"\bmoved away\b",
        "moved, failed over",
        ("the client is moved away from d1",),
        ("the client was moved to d2",),
    ),
    Rule(
        "the dead",
        rf"\bthe dead\b(?! {_PROCESS}\b)",
        "exited client, memory of exited clients",
        ("leases of the dead", "the dead, by age"),
        ("memory of exited clients", "the dead server", "the deadline"),
    ),
    Rule(
        "kernel part",
        r"\bkernel[ -]parts?\b",
        "kernel module, patched nvidia-uvm",
        ("the kernel part is absent", "a kernel-part record"),
        ("the kernel module is absent",),
    ),
    Rule(
        "sunk",
        r"\b(?:sinks?|sunk|sank|sinking)\b",
        "absorbed (by a guard zone, by a sparse mapping)",
        ("the store was sunk", "it sinks stray writes", "a sink"),
        ("absorbed by a guard zone", "synced"),
    ),
    Rule(
        "can be survived",
        r"\b(?:can|could|may|cannot|can't)(?: not)? be survived\b",
        "protected / not protected",
        ("1 can be survived now",),
        ("protected: failover", "can be started"),
    ),
    Rule(
        "twin",
        r"\btwins?\b",
        "standby context, shadow object, counterpart",
        ("the twin of a stream",),
        ("the shadow object of a stream", "between"),
    ),
    Rule(
        "member for a participant",
        r"(?<!group )\bmembers?\b"
        r"(?! of (?:(?:the|this|its|a) )?(?:[\w-]+ )?c?group\b)(?! of a (?:struct|union)\b)",
        "fail-over participant",
        ("two members of d1", "every member replays"),
        (
            "two participants of d1",
            "be a member of group mpsd",
            "a member of the mpsd group",
            "a group member",
            "remember",
        ),
    ),
    Rule(
        "somebody, nobody, whoever",
        r"\b(?:somebody|nobody|whoever|whomever|anybody|everybody)\b(?!:)(?<!user nobody)",
        "a noun: the client, no client, the user",
        ("somebody uses it", "nobody is named", "whoever asks"),
        ("no client is named", "run it as user nobody", "chown nobody:nogroup"),
    ),
)
"""The bans of the vocabulary. The last ban also covers texts in which the word does not come first."""

OPENING = re.compile(
    r"^[\W_]*(?P<word>what|who|whose|whom|whoever|whomever|whatever|whichever|somebody|nobody|anybody|everybody"
    r"|someone|no one|(?:those|the ones?|he|others?)(?= (?:who|that|whose|with)\b))\b(?! to\b)",
    re.IGNORECASE,
)
OPENING_BAD = (
    Text("a.py", 1, "message", "who asks must own the client"),
    Text("a.py", 1, "message", "d1 faulted. Whose work it was is not known"),
    Text("a.py", 1, "message", "leases: whoever holds one"),
    Text("a.py", 1, "help", "what is of clients without a proxy"),
    Text("a.py", 1, "message", "those that hold a lease stay"),
    Text("a.py", 1, "message", "the one who made it is named"),
    Text("a.py", 1, "message", "who made it?"),
    Text("README.md", 1, "page", "Nobody is named."),
    Text("README.md", 1, "page", "mpsd moves clients. What cannot move ends."),
    Text("README.md", 1, "heading", "Who goes on"),
)
OPENING_GOOD = (
    Text("a.py", 1, "message", "the caller must own the client"),
    Text("a.py", 1, "message", "no client is named"),
    Text("a.py", 1, "help", "what to do with the client"),
    Text("README.md", 1, "page", "Who may evict a client?"),
    Text("README.md", 1, "heading", "What it is"),
    Text("README.md", 1, "page", "The user who owns the client may evict it."),
)


@dataclass(frozen=True, slots=True)
class Exempt:
    """A text that may break a rule: the whole text as collected, and why it cannot be said otherwise."""

    file: str
    rule: str
    text: str
    reason: str


EXEMPT: tuple[Exempt, ...] = ()
MAX_EXEMPT = 0
"""A new exception must raise this number too: plain words are nearly always possible."""


@dataclass(frozen=True, slots=True)
class Finding:
    text: Text
    rule: str
    said: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.text.file, self.rule, self.text.text

    def __str__(self) -> str:
        return f"{self.text.file}:{self.text.line}: {self.rule}: {self.said}"


_CODE = re.compile(r"`[^`]*`|\[\w+\] \w+|(?<!\S)[\"'(]*(?:--?\w|/\w|\S*(?:_|::|=|\w\.\w|\w/\w+/))\S*")


def without_names(text: str) -> str:
    """Return the text without inline code, options, paths and identifiers, which keep their names."""
    return _CODE.sub(HOLE, text)


def openings(text: Text) -> Iterator[str]:
    """Yield the sentences, and the labels and clauses behind ":" and ";", that open with a free relative."""
    is_page = text.kind in ("page", "heading")
    for sentence in sentences(text):
        for clause in re.split(r"(?<=[:;]) +", sentence):
            found = OPENING.match(clause)
            if not found or (is_page and clause.endswith("?")):
                continue
            if text.kind != "heading" or found["word"].lower() != "what":
                yield clause


def findings_in(text: Text) -> Iterator[Finding]:
    yield from (Finding(text, OPENING_RULE, said) for said in openings(text))
    bare = without_names(text.text)
    for rule in BANNED:
        for match in re.finditer(rule.pattern, bare, re.IGNORECASE):
            around = bare[max(0, match.start() - 60) : match.end() + 60]
            yield Finding(text, rule.name, f"{' '.join(around.split())} -> {rule.use}")
    for sentence in sentences(text) if text.is_prose else ():
        if words(sentence) > MAX_WORDS:
            yield Finding(text, LENGTH_RULE, f"{words(sentence)} words: {sentence}")


@cache
def texts() -> tuple[Text, ...]:
    return tuple(collect(ROOT))


@cache
def findings() -> tuple[Finding, ...]:
    return tuple(finding for text in texts() for finding in findings_in(text))


def check(rule: str) -> None:
    """Fail with the findings of one rule that no exception covers."""
    excused = {(exempt.file, exempt.rule, exempt.text) for exempt in EXEMPT}
    found = [one for one in findings() if one.rule == rule and one.key not in excused]
    lines = [str(one) for one in found[:MAX_SHOWN]]
    more = f"... and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
    assert not found, "\n".join([f"{len(found)} texts to say in plain words", *lines, more])


def test_no_sentence_or_label_begins_with_a_free_relative() -> None:
    check(OPENING_RULE)


@pytest.mark.parametrize("rule", [rule.name for rule in BANNED])
def test_no_text_uses_a_banned_word(rule: str) -> None:
    check(rule)


def test_no_sentence_of_pages_and_help_has_more_than_30_words() -> None:
    check(LENGTH_RULE)


def test_exceptions_are_few_used_and_explained() -> None:
    used = {one.key for one in findings()}
    assert len(EXEMPT) <= MAX_EXEMPT
    assert [exempt for exempt in EXEMPT if (exempt.file, exempt.rule, exempt.text) not in used] == []
    assert all(exempt.reason for exempt in EXEMPT)


# Each rule fires on its sample.


def rules_of(text: Text) -> set[str]:
    return {one.rule for one in findings_in(text)}


@pytest.mark.parametrize(("rule", "sample"), [(rule.name, bad) for rule in BANNED for bad in rule.bad])
def test_a_ban_fires(rule: str, sample: str) -> None:
    assert rule in rules_of(Text("a.py", 1, "message", sample))


@pytest.mark.parametrize(("rule", "sample"), [(rule.name, good) for rule in BANNED for good in rule.good])
def test_a_ban_does_not_fire(rule: str, sample: str) -> None:
    assert rules_of(Text("a.py", 1, "message", sample)) == set()


@pytest.mark.parametrize(
    "name", ["`spare`", "[domains] spare", "domains.spare", "--spare", "spare_s", "spare=1"]
)
def test_names_of_the_interface_are_no_words(name: str) -> None:
    assert rules_of(Text("a.py", 1, "message", f"set {name} to false")) == set()


@pytest.mark.parametrize("text", OPENING_BAD, ids=lambda text: text.text)
def test_an_opening_fires(text: Text) -> None:
    assert OPENING_RULE in rules_of(text)


@pytest.mark.parametrize("text", OPENING_GOOD, ids=lambda text: text.text)
def test_an_opening_does_not_fire(text: Text) -> None:
    assert rules_of(text) == set()


LONG = "word " * MAX_WORDS


@pytest.mark.parametrize("kind", ["page", "help", "config", "comment"])
def test_a_long_sentence_fires(kind: str) -> None:
    assert rules_of(Text("a", 1, kind, f"{LONG}more.")) == {LENGTH_RULE}
    assert rules_of(Text("a", 1, kind, f"{LONG}. mpsd {LONG[5:]}.")) == set()
    assert rules_of(Text("a", 1, kind, f"{LONG[50:]}e.g. {LONG}")) == {LENGTH_RULE}


def test_a_long_message_is_no_long_sentence() -> None:
    assert rules_of(Text("a", 1, "message", f"{LONG}more.")) == set()


# A collection that missed a folder would pass.


@pytest.mark.parametrize(
    ("kind", "where", "least"),
    [
        ("message", "mpsd/", 500),
        ("message", "clients/mpsd_client/", 50),
        ("message", "clients/libcuda/src/", 50),
        ("message", "faultinject/", 200),
        ("message", "kmod_patches/kmod/", 50),
        ("message", "scripts/", 20),
        ("help", "mpsd/ctl/", 20),
        ("help", "clients/mpsd_client/", 10),
        ("help", "scripts/", 5),
        ("config", "mpsd/config", 20),
        ("page", "README.md", 20),
        ("comment", "scripts/packaging/", 3),
    ],
)
def test_texts_are_found_where_they_are(kind: str, where: str, least: int) -> None:
    assert sum(text.kind == kind and text.file.startswith(where) for text in texts()) >= least


PACKAGES = (
    "mpsd",
    "faultinject",
    "clients/mpsd_client",
    "clients/libcuda/libcuda_build",
    "clients/libcuda/mpsd_libcuda",
    "kmod_patches/kmod",
)
LOOSE_IN_CODE = {"member for a participant", "sunk", "twin"}
"""Rules for users' texts alone: in code these are terms too (enum members, sinks of events)."""


@pytest.mark.parametrize("folder", PACKAGES)
def test_docstrings_and_comments_use_the_vocabulary(folder: str) -> None:
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for text in code_texts(path.read_text(), str(path.relative_to(ROOT))):
            found = [f for f in findings_in(text) if f.rule not in {OPENING_RULE, *LOOSE_IN_CODE}]
            opens = text.kind == "docstring" and OPENING.match(without_names(text.text))
            wrong += [str(one) for one in found]
            wrong += [f"{text.file}:{text.line}: {text.text[:60]}"] if opens else []
    assert not wrong, "\n".join(wrong)


def test_a_docstring_in_the_old_words_is_found() -> None:
    source = '"""What is of clients."""\n# nobody has it\n'
    docstring, comment = code_texts(source, "a.py")
    assert OPENING.match(docstring.text)
    assert [f.rule for f in findings_in(comment)] == [OPENING_RULE, "somebody, nobody, whoever"]
