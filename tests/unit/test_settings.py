"""Settings that must outlive the control daemon they were given to."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from mpsd.config import Limits
from mpsd.settings import ControlSettings, Setting, mebibytes, understood

GPUS = ("GPU-a", "GPU-b")


def setting(command: str) -> Setting:
    found = understood(command, GPUS)
    assert found is not None
    return found


def test_configuration_becomes_commands() -> None:
    limits = Limits(25.0, 1, MappingProxyType({"0": "2G", "GPU-a": "512M"}))
    assert ControlSettings(limits).commands(7) == (
        "set_default_active_thread_percentage 25",
        "set_default_client_priority 1",
        "set_default_device_pinned_mem_limit 0 2048M",
        "set_default_device_pinned_mem_limit GPU-a 512M",
    )
    assert mebibytes("3G") == 3072


@pytest.mark.parametrize("command", ["", "quit", "get_server_list", "terminate_client 1 2", "SET_DEFAULT x"])
def test_other_commands_are_no_settings(command: str) -> None:
    assert understood(command, GPUS) is None


@pytest.mark.parametrize(
    "command",
    [
        "set_default_active_thread_percentage",
        "set_default_active_thread_percentage 0",
        "set_default_active_thread_percentage 100.1",
        "set_default_active_thread_percentage 1e1",
        "set_default_active_thread_percentage nan",
        "set_default_active_thread_percentage 4\N{ARABIC-INDIC DIGIT THREE}",
        "set_default_active_thread_percentage 40 50",
        "set_default_client_priority 2",
        "set_default_client_priority -1",
        "set_default_device_pinned_mem_limit 0",
        "set_default_device_pinned_mem_limit 2 1G",
        "set_default_device_pinned_mem_limit -1 1G",
        "set_default_device_pinned_mem_limit GPU-c 1G",
        "set_default_device_pinned_mem_limit 0 0G",
        "set_default_device_pinned_mem_limit 0 1T",
        "set_default_device_pinned_mem_limit 0 1.5G",
        "set_default_device_pinned_mem_limit 0 999999999999G",
        "set_default_client_priority" + " " * 300 + "1",
    ],
)
def test_settings_that_cannot_be_are_refused(command: str) -> None:
    with pytest.raises(ValueError, match="takes"):
        understood(command, GPUS)


@pytest.mark.parametrize(
    ("command", "question", "reply", "agreed"),
    [
        ("active_thread_percentage 40", "active_thread_percentage", "40.0\n", True),
        ("active_thread_percentage 33.333", "active_thread_percentage", "33.3", True),
        ("active_thread_percentage 40", "active_thread_percentage", "100.0", False),
        ("client_priority 1", "client_priority", "1", True),
        ("client_priority 1", "client_priority", "0", False),
        ("client_priority 1", "client_priority", "Unknown command", False),
        ("device_pinned_mem_limit 1 512m", "device_pinned_mem_limit 1", "512M", True),
        ("device_pinned_mem_limit 1 2048M", "device_pinned_mem_limit 1", "2G", True),
        ("device_pinned_mem_limit 1 1044M", "device_pinned_mem_limit 1", "1G", True),
        ("device_pinned_mem_limit 1 512M", "device_pinned_mem_limit 1", "1G", False),
        ("device_pinned_mem_limit 1 512M", "device_pinned_mem_limit 1", "512", False),
        ("device_pinned_mem_limit GPU-b 512M", "device_pinned_mem_limit GPU-b", "", False),
    ],
)
def test_the_control_daemon_is_asked(command: str, question: str, reply: str, agreed: bool) -> None:
    found = setting(f"set_default_{command}")
    assert found.question == f"get_default_{question}"
    assert found.confirmed(reply) == agreed


def test_the_last_setting_by_hand_wins_for_its_owner_alone() -> None:
    settings = ControlSettings(Limits(25.0))
    forty = setting("set_default_active_thread_percentage 40")
    assert not settings.known(forty, 7)
    settings.learn(forty, 7)
    assert settings.known(forty, 7) and not settings.known(forty, None)
    assert settings.commands(7) == ("set_default_active_thread_percentage 40",)
    assert settings.commands(8) == settings.commands(None) == ("set_default_active_thread_percentage 25",)
    assert settings.limit_of("GPU-a") == {
        "active_thread_percentage": "25",
        "active_thread_percentage (user 7)": "40",
    }
    again = ControlSettings(Limits())
    again.restore(settings.by_hand(), GPUS)
    assert again.limit_of("GPU-a") == {"active_thread_percentage (user 7)": "40"}


def test_a_limit_by_number_or_by_uuid_is_in_force_if_it_came_last() -> None:
    settings = ControlSettings(Limits())
    by_number, by_uuid = (setting(f"set_default_device_pinned_mem_limit {n} 1G") for n in ("0", "GPU-a"))
    for each in (by_number, by_uuid, by_number):
        settings.learn(each, None)
    assert settings.commands(None) == (by_uuid.command, by_number.command)
    assert settings.limit_of("GPU-a") == {"device_pinned_mem_limit": "1G"}


def test_only_what_was_set_by_hand_is_kept_over_a_restart() -> None:
    settings = ControlSettings(Limits(25.0, 1))
    assert settings.by_hand() == {}
    settings.learn(setting("set_default_client_priority 0"), None)
    assert settings.by_hand() == {"everybody": ["set_default_client_priority 0"]}
    # The configuration has changed meanwhile: what it says now counts, but for what was set by hand.
    later = ControlSettings(Limits(50.0, 1))
    later.restore(settings.by_hand(), GPUS)
    assert set(later.commands(None)) == {
        "set_default_active_thread_percentage 50",
        "set_default_client_priority 0",
    }
    later.learn(setting("set_default_client_priority 1"), None)
    assert later.by_hand() == {}


def test_a_state_that_holds_more_than_settings_is_refused_where_it_is_wrong() -> None:
    settings = ControlSettings(Limits())
    settings.restore({"7": ["quit"]}, GPUS)
    assert settings.commands(7) == ()
    for wrong in ({"7": ["set_default_client_priority 9"]}, {"x": ["set_default_client_priority 1"]}):
        with pytest.raises(ValueError):
            settings.restore(wrong, GPUS)
