"""The machine's own apt configuration says where other suites are."""

from __future__ import annotations

from pathlib import Path

import pytest

from kmod import aptsources
from kmod.aptsources import Source
from kmod.debian import private_state
from kmod.errors import Unavailable

DEB822 = """\
# first
Types: deb deb-src
URIs: mirror:/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /keys/archive.gpg

Types: deb
URIs: mirror:/security
Suites: bookworm-security
Components: main
"""


def test_a_stanza_is_read() -> None:
    first, second = aptsources.parse_stanzas(DEB822)
    assert first == Source(("mirror:/debian",), ("bookworm", "bookworm-updates"), "/keys/archive.gpg")
    assert second == Source(("mirror:/security",), ("bookworm-security",))


def test_a_stanza_that_is_switched_off_or_for_sources_alone_is_left_out() -> None:
    text = "Types: deb-src\nURIs: a\nSuites: sid\n\nEnabled: no\nURIs: b\nSuites: sid\n"
    assert list(aptsources.parse_stanzas(text)) == []


def test_a_line_is_read_with_and_without_options() -> None:
    text = "deb [arch=amd64 signed-by=/k.gpg] mirror:/debian trixie main # note\n# deb x y z\ndeb-src a b c\n"
    assert list(aptsources.parse_lines(text)) == [Source(("mirror:/debian",), ("trixie",), "/k.gpg")]
    assert list(aptsources.parse_lines("deb mirror:/d sid main")) == [Source(("mirror:/d",), ("sid",))]


def test_files_that_apt_does_not_read_are_not_read(tmp_path: Path) -> None:
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (tmp_path / "sources.list").write_text("deb one sid main\n")
    (parts / "b.sources").write_text("URIs: two\nSuites: sid\n")
    (parts / "a.list").write_text("deb three sid main\n")
    (parts / "c.sources.disabled").write_text("URIs: four\nSuites: sid\n")
    assert [source.uris for source in aptsources.read(tmp_path)] == [("one",), ("three",), ("two",)]


def test_without_any_configuration_nothing_is_found(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="has no Debian archive"):
        aptsources.debian(aptsources.read(tmp_path / "missing"))


def test_another_vendors_archive_and_the_security_one_are_not_taken() -> None:
    vendor = Source(("vendor:/apt",), ("nodistro",))
    security = Source(("mirror:/security",), ("bookworm-security",))
    archive = Source(("mirror:/debian",), ("bookworm",))
    assert aptsources.debian([vendor, security, archive]) is archive
    with pytest.raises(Unavailable):
        aptsources.debian([vendor, security])


def test_another_suite_is_signed_as_the_archive_is() -> None:
    archive = Source(("mirror:/debian", "other:/debian"), ("bookworm",), "/keys/archive.gpg")
    assert aptsources.derive(archive, "trixie").splitlines() == [
        "Types: deb",
        "URIs: mirror:/debian other:/debian",
        "Suites: trixie",
        "Components: contrib",
        "Signed-By: /keys/archive.gpg",
    ]
    assert "Signed-By" not in aptsources.derive(Source(("m",), ("sid",)), "sid")


def test_a_key_inside_the_file_goes_with_it() -> None:
    text = "URIs: m\nSuites: sid\nSigned-By:\n BEGIN\n .\n key\n"
    (source,) = aptsources.parse_stanzas(text)
    derived = aptsources.derive(source, "experimental")
    assert derived.endswith("Signed-By:\n BEGIN\n .\n key\n")
    assert next(iter(aptsources.parse_stanzas(derived))).signed_by == source.signed_by


def test_the_private_state_knows_its_own_source_and_no_other(tmp_path: Path) -> None:
    options = private_state(tmp_path / "state", "Types: deb\n")
    settings = dict(word.split("=", 1) for word in options if word != "-o")
    assert Path(settings["Dir::Etc::SourceList"]).read_text() == "Types: deb\n"
    assert settings["Dir::Etc::SourceParts"] == "/dev/null"
    below = [settings["Dir::State::Lists"], settings["Dir::Cache"]]
    assert all(Path(path).is_relative_to(tmp_path) for path in below)
    assert (tmp_path / "state/lists/partial").is_dir()
