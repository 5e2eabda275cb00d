"""Settings that must outlive the control daemon they were given to."""

from __future__ import annotations

from types import MappingProxyType

from mpsd.config import Limits
from mpsd.settings import ControlSettings, mebibytes


def test_configuration_becomes_commands() -> None:
    limits = Limits(25.0, 1, MappingProxyType({"0": "2G", "GPU-a": "512M"}))
    assert ControlSettings(limits).commands() == (
        "set_default_active_thread_percentage 25",
        "set_default_client_priority 1",
        "set_default_device_pinned_mem_limit 0 2048M",
        "set_default_device_pinned_mem_limit GPU-a 512M",
    )
    assert mebibytes("3G") == 3072


def test_the_last_setting_by_hand_wins_and_only_settings_are_learned() -> None:
    settings = ControlSettings(Limits(25.0))
    assert settings.learn("set_default_active_thread_percentage 40")
    assert not settings.learn("set_default_active_thread_percentage 40")
    for other in (
        "quit",
        "get_server_list",
        "set_default_active_thread_percentage",
        "",
        "terminate_client 1 2",
    ):
        assert not settings.learn(other)
    assert settings.commands() == ("set_default_active_thread_percentage 40",)
    again = ControlSettings(Limits())
    again.restore(settings.commands())
    assert again.limit_of("GPU-a") == {"active_thread_percentage": "40"}


def test_only_what_was_set_by_hand_is_kept_over_a_restart() -> None:
    settings = ControlSettings(Limits(25.0, 1))
    assert settings.by_hand() == ()
    settings.learn("set_default_client_priority 0")
    assert settings.by_hand() == ("set_default_client_priority 0",)
    # The configuration has changed meanwhile: what it says now counts, but for what was set by hand.
    later = ControlSettings(Limits(50.0, 1))
    later.restore(settings.by_hand())
    assert set(later.commands()) == {
        "set_default_active_thread_percentage 50",
        "set_default_client_priority 0",
    }
    later.learn("set_default_client_priority 1")
    assert later.by_hand() == ()
