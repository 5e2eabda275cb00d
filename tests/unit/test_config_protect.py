"""The key `protect`, levels of single users, and the keys of an earlier release that it replaces."""

from __future__ import annotations

import io
import os
import pwd
from argparse import ArgumentParser
from pathlib import Path

import pytest

from mpsd.base.errors import ConfigError
from mpsd.base.protection import ProtectionLevel, ProtectSetting
from mpsd.config import commands
from mpsd.config.protect import user_levels
from mpsd.config.reader import load, to_toml, unknown_variables
from mpsd.config.schema import Config

PLACES = "\n".join(f"{name}_dir = '/tmp/no-{os.getpid()}/{name}'" for name in ("run", "log", "state"))
ENVIRON = {"HOME": "/home/one"}
AUTO, OBSERVE, GUARD, FAILOVER = ProtectSetting


def read(tmp_path: Path, text: str, **environ: str) -> tuple[Config, list[str]]:
    path, warned = tmp_path / "mpsd.toml", list[str]()
    path.write_text(text)
    return load(path, {**ENVIRON, **environ}, warn=warned.append), warned


def check(tmp_path: Path, text: str) -> str:
    path, out, parser = tmp_path / "mpsd.toml", io.StringIO(), ArgumentParser()
    path.write_text(f"{PLACES}\n{text}\n")
    commands.add_arguments(parser)
    assert commands.run(parser.parse_args(["check", str(path)]), ENVIRON, out, out) == 0
    return out.getvalue()


def test_the_default_is_auto(tmp_path: Path) -> None:
    config, warned = read(tmp_path, "")
    assert config.protect is AUTO and not config.users and not warned


@pytest.mark.parametrize(
    ("text", "environ", "wanted", "advice"),
    [
        (
            "[vault]\nenabled = true\n[failover]\nenabled = true",
            {},
            FAILOVER,
            'write protect = "failover" instead of',
        ),
        (
            "[vault]\nenabled = true\n[failover]\nenabled = false",
            {},
            GUARD,
            'write protect = "guard" instead',
        ),
        ("[vault]\nenabled = true", {}, GUARD, 'write protect = "guard" instead'),
        ("[vault]\nenabled = false\n[failover]\nenabled = false", {}, OBSERVE, 'protect = "observe"'),
        ("[vault]\nenabled = false", {}, OBSERVE, 'protect = "observe"'),
        ("[failover]\nenabled = true", {}, FAILOVER, 'protect = "failover"'),
        ("[vault]\nenabled = true\n[failover]\nenabled = true\nmode = 'off'", {}, GUARD, "[failover] mode"),
        ("[failover]\nmode = 'off'", {}, OBSERVE, 'protect = "observe"'),
        ("", {"MPSD_VAULT_ENABLED": "true"}, GUARD, "$MPSD_VAULT_ENABLED"),
        (
            "",
            {"MPSD_VAULT_ENABLED": "true", "MPSD_FAILOVER_ENABLED": "true"},
            FAILOVER,
            "$MPSD_FAILOVER_ENABLED",
        ),
        ("[vault]\nenabled = true\n", {"MPSD_FAILOVER_ENABLED": "true"}, FAILOVER, "[vault] enabled"),
        ("[vault]\nenabled = true\n", {"MPSD_VAULT_ENABLED": "false"}, OBSERVE, "$MPSD_VAULT_ENABLED"),
        (
            "[vault]\nenabled = true",
            {"MPSD_FAILOVER_MODE": "off", "MPSD_FAILOVER_ENABLED": "true"},
            GUARD,
            "MODE",
        ),
        ("protect = 'auto'\n[vault]\nenabled = true", {}, AUTO, "remove [vault] enabled: protect is set too"),
        (
            "[vault]\nenabled = false",
            {"MPSD_PROTECT": "guard"},
            GUARD,
            "remove [vault] enabled: protect is set too",
        ),
    ],
)
def test_keys_of_an_earlier_release_still_work_with_one_line(
    tmp_path: Path, text: str, environ: dict[str, str], wanted: ProtectSetting, advice: str
) -> None:
    config, warned = read(tmp_path, text, **environ)
    assert config.protect is wanted
    (line,) = warned
    assert advice in line and "\n" not in line
    assert not unknown_variables(environ)


def test_a_mode_that_stays_is_no_key_of_an_earlier_release(tmp_path: Path) -> None:
    text = "[failover]\nmode = 'off'"
    config, warned = read(tmp_path, text, MPSD_FAILOVER_MODE="keep")
    assert (config.failover.mode, config.protect, warned) == ("keep", AUTO, [])
    assert read(tmp_path, "[failover]\nmode = 'keep'")[1] == []


def test_keys_that_became_constants_have_no_effect(tmp_path: Path) -> None:
    text = "[guard]\nfollow_interval_s = 0.5\n[lease]\nprobe_interval_ms = 20\n[vault]\nenabled = true"
    config, warned = read(tmp_path, text, MPSD_JOURNAL_EVIDENCE_WINDOW_S="3")
    assert config.protect is GUARD
    (line,) = warned
    assert 'write protect = "guard" instead of [vault] enabled; remove [guard] follow_interval_s and' in line
    assert line.endswith("$MPSD_JOURNAL_EVIDENCE_WINDOW_S: without effect")
    assert read(tmp_path, "", MPSD_LEASE_PROBE_INTERVAL_MS="5")[0].protect is AUTO
    assert not unknown_variables({"MPSD_GUARD_FOLLOW_INTERVAL_S": "1"})


def test_an_earlier_key_must_be_true_or_false(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[vault\] enabled must be true or false"):
        read(tmp_path, "[vault]\nenabled = 3")
    with pytest.raises(ConfigError, match=r"\$MPSD_FAILOVER_ENABLED must be true or false"):
        read(tmp_path, "", MPSD_FAILOVER_ENABLED="some")


def test_check_prints_the_line_and_the_limits(tmp_path: Path) -> None:
    told = check(tmp_path, "[vault]\nenabled = true")
    assert told.startswith("mpsd: ") and 'write protect = "guard" instead' in told
    assert told.endswith('protection: limited by the settings: protect = "guard"\n')
    assert "no setting limits it" in check(tmp_path, "")
    assert 'set [failover] mode = "exact"' in check(tmp_path, "[failover]\nmode = 'keep'")
    lowered = check(tmp_path, "[users]\nroot = 'guard'")
    assert lowered.endswith("user root: at most guard\n")
    # A level that is no lower than the node's limits nothing.
    assert "user root" not in check(tmp_path, "protect = 'guard'\n[users]\nroot = 'failover'")


def test_users_are_named_by_name_or_uid(tmp_path: Path) -> None:
    config, _ = read(tmp_path, "[users]\nroot = 'guard'\n4711 = 'observe'\n0 = 'observe'")
    levels, unknown = user_levels(config)
    assert levels == {0: ProtectionLevel.OBSERVE, 4711: ProtectionLevel.OBSERVE} and not unknown
    assert load(write(tmp_path, to_toml(config)), {}).users == config.users
    config, _ = read(tmp_path, "", MPSD_USERS='{ root = "guard" }')
    assert user_levels(config) == ({0: ProtectionLevel.GUARD}, ())


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "shown.toml"
    path.write_text(text)
    return path


def test_an_unknown_user_is_an_error_of_check_alone(tmp_path: Path) -> None:
    name = "no-such-user"
    with pytest.raises(KeyError):
        pwd.getpwnam(name)
    text = f"[users]\n{name} = 'guard'"
    config, _ = read(tmp_path, text)
    assert user_levels(config) == ({}, (name,))
    with pytest.raises(ConfigError, match=rf"(?s)'{name}'.*write the uid instead"):
        check(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("protect = 'most'", "auto, observe, guard, failover"),
        ("protect = true", "is not one of auto"),
        ("[users]\nroot = 'auto'", "users.root = 'auto' is not one of observe, guard, failover"),
        ("users = 'root'", "users must be a table"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)
    assert wanted in str(refused.value)
