"""Limits of running domains, with stand-ins for the control daemons that answer as several releases do."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import MappingProxyType

import pytest

from mpsd.base.conditions import Code
from mpsd.config.schema import Limits
from mpsd.limits import keeper as keeping
from mpsd.limits.book import Owner
from mpsd.limits.values import Key, Kind
from tests.support.limiting import OWNER, Scene, StandIn, play

ASKED = "get_active_thread_percentage 100"
PERCENTAGE, MEMORY = Key(Kind.PERCENTAGE), Key(Kind.MEMORY, "GPU-a")


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "STEP_S", 0.0)
    monkeypatch.setattr(keeping, "STAGGER_S", 0.0)


def test_a_new_domain_without_limits_gets_no_command() -> None:
    async def scene() -> None:
        at = Scene()
        assert (await at.start("d1", StandIn())).said == []
        assert at.keeper.answers("d1")[PERCENTAGE] == "100"

    play(scene)


def test_a_new_domain_has_its_limits_before_its_server_starts() -> None:
    async def scene() -> None:
        at = Scene(Limits(25.0, 1, MappingProxyType({"0": "2G", "1": "1G"})))
        control = StandIn()
        await at.keeper.give("d1", OWNER, control)
        assert control.wrote() == [
            "set_default_active_thread_percentage 25",
            "set_default_client_priority 1",
            "set_default_device_pinned_mem_limit 0 2048M",
        ]
        control.start_server()
        at.serving.add("d1")
        await at.keeper.confirm("d1")
        assert len(control.wrote()) == 3
        assert at.keeper.answers("d1")[MEMORY] == "2048M"
        assert at.keeper.conditions() == []

    play(scene)


@pytest.mark.parametrize("of_server", [False, True])
def test_a_limit_set_by_hand_reaches_the_running_server_and_the_standby_domain(of_server: bool) -> None:
    async def scene() -> None:
        at = Scene()
        active, standby = await at.start("d1", StandIn()), await at.start("d2", StandIn())
        other = await at.start("d3", StandIn(("GPU-b",)), Owner(("GPU-b",), 7))
        percentage, memory = (
            ("active_thread_percentage 100", "device_pinned_mem_limit 100 0")
            if of_server
            else ("default_active_thread_percentage", "default_device_pinned_mem_limit 0")
        )
        await at.by_hand("d1", active, percentage, "50")
        await at.by_hand("d1", active, memory, "2G")
        for control in (active, standby):
            assert control.values["default_active_thread_percentage"] == "50.0"
            assert control.values["active_thread_percentage 100"] == "50.0"
            assert control.values["default_device_pinned_mem_limit 0"] in ("2G", "2048M")
            assert control.values["device_pinned_mem_limit 100 0"] in ("2G", "2048M")
        assert other.wrote() == []
        fresh = await at.start("d4", StandIn())
        assert fresh.values["active_thread_percentage 100"] == "50.0"
        assert fresh.values["device_pinned_mem_limit 100 0"] == "2048M"
        assert at.rejected == 0

    play(scene)


def test_the_state_is_written_before_another_domain_has_the_limit() -> None:
    async def scene() -> None:
        at = Scene()
        active, standby = await at.start("d1", StandIn()), await at.start("d2", StandIn())

        def known_to_a_later_mpsd(text: str) -> None:
            if text.startswith("set_"):
                assert at.saved[-1]["slots"][0]["limits"][0]["value"] == "50"

        active.before = standby.before = known_to_a_later_mpsd
        await at.by_hand("d1", active, "default_active_thread_percentage", "50")
        assert standby.wrote()

    play(scene)


def test_a_limit_is_stored_although_no_domain_lacks_it() -> None:
    async def scene() -> None:
        at = Scene()
        control = await at.start("d1", StandIn())
        await at.by_hand("d1", control, "default_client_priority", "1")
        assert control.wrote() == []
        ((limit,),) = (row["limits"] for row in at.saved[-1]["slots"])
        assert limit == {"kind": "client_priority", "gpu": "", "value": "1"}

    play(scene)


def test_the_commands_of_mpsd_itself_cause_no_question() -> None:
    async def scene() -> None:
        at = Scene()
        active, standby = await at.start("d1", StandIn()), await at.start("d2", StandIn())
        await at.by_hand("d1", active, "default_active_thread_percentage", "50")
        asked = len(standby.said)
        for text in standby.wrote():
            at.keeper.said("d2", text)
        await at.settled()
        assert len(standby.said) == asked

    play(scene)


def test_a_line_that_the_control_daemon_does_not_confirm_sets_nothing() -> None:
    async def scene() -> None:
        at = Scene()
        control = await at.start("d1", StandIn())
        at.keeper.said("d1", "set_default_active_thread_percentage 7")
        at.keeper.said("d1", "set_default_device_pinned_mem_limit 3 1G")
        await at.settled()
        assert at.rejected == 2 and at.book.rows() == [] and control.wrote() == []

    play(scene)


def whole_part(subject: str, value: str) -> str | None:
    """Read a number up to its first other character, as C's strtol does."""
    found = re.match(r"[0-9]+", value)
    unit = value[-1] if "mem" in subject else ""
    return f"{found[0]}{unit}" if found else None


@pytest.mark.parametrize(
    ("reads", "subject", "text", "kept"),
    [
        (whole_part, "default_device_pinned_mem_limit 0", "1.5G", {MEMORY: "1024M"}),
        (lambda *_: None, "default_device_pinned_mem_limit 0", "1.5G", {}),
        (whole_part, "default_active_thread_percentage", "50%", {PERCENTAGE: "50"}),
        (lambda *_: None, "default_active_thread_percentage", "50%", {}),
        (lambda *_: "2G", "default_device_pinned_mem_limit 0", "2 G", {MEMORY: "2048M"}),
    ],
)
def test_of_a_value_in_another_form_the_answer_counts(
    reads: Callable[[str, str], str | None], subject: str, text: str, kept: dict[Key, str]
) -> None:
    async def scene() -> None:
        at = Scene()
        control, standby = await at.start("d1", StandIn(reads=reads)), await at.start("d2", StandIn())
        await at.by_hand("d1", control, subject, text)
        wanted = at.book.wanted(OWNER)
        assert {key: wanted[key] for key in kept} == kept
        assert bool(at.book.rows()) == bool(kept) and (kept or at.rejected == 1)
        assert bool(standby.wrote()) == bool(kept)

    play(scene)


def test_a_rounded_answer_does_not_round_the_limit() -> None:
    def floored(subject: str, value: str) -> str:
        return f"{int(value[:-1]) // 1024}G" if value.endswith("M") and int(value[:-1]) >= 1024 else value

    async def scene() -> None:
        at = Scene()
        active = await at.start("d1", StandIn(reads=floored))
        standby = await at.start("d2", StandIn(reads=floored))
        await at.by_hand("d1", active, "default_device_pinned_mem_limit 0", "1044M")
        await at.by_hand("d1", active, "default_active_thread_percentage", "33.333")
        assert "set_device_pinned_mem_limit 100 0 1044M" in standby.wrote()
        assert "set_default_active_thread_percentage 33.333" in standby.wrote()
        assert at.keeper.conditions() == []

    play(scene)


def test_a_limit_that_differs_by_less_than_the_answer_tells_is_kept() -> None:
    def floored(subject: str, value: str) -> str:
        return "1G" if "mem" in subject else value

    async def scene() -> None:
        at = Scene()
        active = await at.start("d1", StandIn(reads=floored))
        standby = await at.start("d2", StandIn(reads=floored))
        for value in ("1044M", "1100M"):
            await at.by_hand("d1", active, "default_device_pinned_mem_limit 0", value)
        assert at.book.wanted(OWNER)[MEMORY] == "1100M" and at.rejected == 0
        fresh = await at.start("d3", StandIn(reads=floored))
        assert fresh.wrote()[0] == "set_default_device_pinned_mem_limit 0 1100M"
        assert standby.wrote()

    play(scene)


def test_a_limit_that_goes_back_and_forth_is_followed() -> None:
    async def scene() -> None:
        at = Scene()
        active, standby = await at.start("d1", StandIn()), await at.start("d2", StandIn())
        await at.by_hand("d1", active, "default_active_thread_percentage", "50")
        for value in ("1", "0", "1", "0"):
            await at.by_hand("d1", active, "default_client_priority", value)
            assert standby.values["default_client_priority"] == value

    play(scene)


def test_a_limit_by_uuid_is_set_by_ordinal_too_because_some_drivers_ignore_the_uuid() -> None:
    async def scene() -> None:
        at = Scene()
        active, standby = await at.start("d1", StandIn()), await at.start("d2", StandIn())
        await at.by_hand("d1", active, "default_device_pinned_mem_limit 0", "1G")
        await at.by_hand("d1", active, "default_device_pinned_mem_limit GPU-a", "512M")
        assert at.book.wanted(OWNER)[MEMORY] == "512M"
        for control in (active, standby):
            assert control.values["default_device_pinned_mem_limit 0"] == "512M"
            assert control.values["device_pinned_mem_limit 100 0"] == "512M"
        assert at.keeper.answers("d1")[MEMORY] == "512M"

    play(scene)


def test_of_two_commands_at_once_the_later_one_wins() -> None:
    async def scene() -> None:
        at = Scene()
        active = await at.start("d1", StandIn())
        for device, value in (("0", "2G"), ("GPU-a", "1G"), ("0", "3G"), ("GPU-a", "1G")):
            active.set(f"default_device_pinned_mem_limit {device}", value)
            at.keeper.said("d1", f"set_default_device_pinned_mem_limit {device} {value}")
        await at.settled()
        assert at.book.wanted(OWNER)[MEMORY] == "1024M"

    play(scene)


def test_a_value_set_by_hand_while_mpsd_applies_another_is_not_overwritten() -> None:
    async def scene() -> None:
        at = Scene()
        active, standby = await at.start("d1", StandIn()), await at.start("d2", StandIn())

        def interfere(text: str) -> None:
            if text == "get_default_active_thread_percentage":
                standby.before = bool
                standby.set("default_active_thread_percentage", "60")

        standby.before = interfere
        await at.by_hand("d1", active, "default_active_thread_percentage", "50")
        assert at.book.wanted(OWNER)[PERCENTAGE] == "60"
        assert active.values["active_thread_percentage 100"] == "60.0"

    play(scene)


def test_what_was_said_while_no_mpsd_ran_is_found_at_its_next_start() -> None:
    async def scene() -> None:
        before = Scene()
        active, standby = await before.start("d1", StandIn()), await before.start("d2", StandIn())
        await before.by_hand("d1", active, "default_active_thread_percentage", "50")
        active.set("default_device_pinned_mem_limit 0", "2G")
        after = Scene(Limits(30.0, 1), saved=before.saved[-1])
        after.serving |= {"d1", "d2"}
        after.keeper.adopt("d1", OWNER, active)
        after.keeper.adopt("d2", OWNER, standby)
        after.keeper.begin()
        await after.settled()
        assert after.book.wanted(OWNER) == {PERCENTAGE: "50", Key(Kind.PRIORITY): "1", MEMORY: "2048M"}
        for control in (active, standby):
            assert control.values["active_thread_percentage 100"] == "50.0"
            assert control.values["device_pinned_mem_limit 100 0"] in ("2G", "2048M")
            # A change of the configuration reaches domains that run.
            assert control.values["default_client_priority"] == "1"

    play(scene)


def test_a_damaged_state_loses_only_the_answers_that_it_does_not_have() -> None:
    async def scene() -> None:
        at, control = Scene(), StandIn()
        control.start_server()
        answers = {"default active_thread_percentage": "much", "default nonsense": "1"}
        at.keeper.restore(
            {"slots": [], "domains": {"d1": {"server": 100, "answers": answers, "intended": {}}}}
        )
        at.serving.add("d1")
        at.keeper.adopt("d1", OWNER, control)
        at.keeper.begin()
        await at.settled()
        assert at.book.rows() == [] and control.wrote() == []

    play(scene)


def test_the_end_of_adoption_leaves_a_domain_alone_that_is_starting() -> None:
    async def scene() -> None:
        at, control = Scene(Limits(25.0)), StandIn()
        await at.keeper.give("d1", OWNER, control)
        at.serving.add("d1")
        at.keeper.begin()
        await at.settled()
        asked = len(control.said)
        assert asked == len(control.wrote()) * 2
        control.start_server()
        await at.keeper.confirm("d1")
        assert at.keeper.answers("d1")[PERCENTAGE] == "25.0"

    play(scene)


def test_of_a_domain_without_a_history_the_configuration_counts_more_than_its_answers() -> None:
    async def scene() -> None:
        at, control = Scene(Limits(30.0)), StandIn()
        control.set("default_active_thread_percentage", "50")
        control.set("default_device_pinned_mem_limit GPU-a", "2G")
        control.start_server()
        at.serving.add("d1")
        at.keeper.adopt("d1", OWNER, control)
        at.keeper.begin()
        await at.settled()
        assert at.book.wanted(OWNER)[PERCENTAGE] == "30"
        assert control.values["active_thread_percentage 100"] == "30.0"
        # No command removes a memory limit: it ends with the domain.
        assert at.keeper.answers("d1")[MEMORY] == "2G" and at.book.rows() == []

    play(scene)


@pytest.mark.parametrize("died_before_its_first_look", [False, True])
def test_a_limit_that_the_configuration_has_lost_is_not_taken_for_one_set_by_hand(
    died_before_its_first_look: bool,
) -> None:
    async def scene() -> None:
        at, control = Scene(), StandIn()
        if died_before_its_first_look:
            at.keeper.adopt("d1", OWNER, control)
            at = Scene(saved=at.keeper.to_file())
        control.set("default_active_thread_percentage", "25")
        control.set("default_client_priority", "1")
        control.start_server()
        at.serving.add("d1")
        at.keeper.adopt("d1", OWNER, control)
        at.keeper.begin()
        await at.settled()
        assert at.book.rows() == []
        assert control.values["default_active_thread_percentage"] == "100.0"
        assert control.values["active_thread_percentage 100"] == "100.0"
        assert control.values["default_client_priority"] == "0"
        # Later differences were set by hand.
        control.set("default_active_thread_percentage", "40")
        at.keeper.check(["d1"])
        await at.settled()
        assert at.book.wanted(OWNER)[PERCENTAGE] == "40"

    play(scene)


def test_a_server_that_the_control_daemon_starts_later_is_compared() -> None:
    async def scene() -> None:
        at = Scene()
        control = await at.start("d1", StandIn())
        await at.by_hand("d1", control, "default_active_thread_percentage", "50")
        # A control daemon that forgets the default.
        control.values["default_active_thread_percentage"] = "100.0"
        control.start_server(200)
        at.keeper.server_changed("d1")
        await at.settled()
        assert control.values["active_thread_percentage 200"] == "50.0"

    play(scene)


def test_a_faulted_server_gets_no_command_and_its_limits_wait() -> None:
    async def scene() -> None:
        at = Scene()
        active, standby = await at.start("d1", StandIn()), await at.start("d2", StandIn())
        at.serving.remove("d1")
        active.said.clear()
        await at.by_hand("d1", active, "default_active_thread_percentage", "50")
        assert not [text for text in active.said if " 100" in text]
        assert standby.values["active_thread_percentage 100"] == "50.0"
        at.serving.add("d1")
        at.keeper.check(())
        await at.settled()
        assert active.values["active_thread_percentage 100"] == "50.0"

    play(scene)


def test_a_server_that_faults_while_its_limits_are_set_gets_no_further_command() -> None:
    async def scene() -> None:
        at = Scene()
        active, standby = await at.start("d1", StandIn()), await at.start("d2", StandIn())

        def fault(text: str) -> None:
            if text.startswith("set_default_"):
                at.serving.discard("d2")

        standby.before = fault
        await at.by_hand("d1", active, "default_active_thread_percentage", "50")
        assert [text for text in standby.said if " 100" in text] == []
        assert standby.values["default_active_thread_percentage"] == "50.0"
        assert at.keeper.conditions() == []

    play(scene)


def test_a_limit_that_the_control_daemon_refuses_is_a_condition_with_a_remedy() -> None:
    async def scene() -> None:
        at = Scene(Limits(25.0))
        await at.start("d1", StandIn(reads=lambda *_: None))
        (found,) = at.keeper.conditions()
        assert (found.code, found.subject) == (Code.LIMITS_NOT_APPLIED, "d1")
        assert found.detail.startswith("active_thread_percentage 25 (the control daemon answers 100.0)")
        assert found.remedy and found.view()["degrades"]

    play(scene)


def test_a_control_daemon_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        at = Scene()
        control = await at.start("d1", StandIn())
        control.fails = "no answer"
        await at.by_hand("d1", control, "default_active_thread_percentage", "50")
        assert [c.detail for c in at.keeper.conditions()] == ["no answer"]
        at.keeper.check(())
        assert at.tasks == set()
        monkeypatch.setattr(at.keeper._loop, "time", lambda: float("inf"))
        control.fails = ""
        at.keeper.check(())
        monkeypatch.undo()
        await at.settled()
        assert at.book.wanted(OWNER)[PERCENTAGE] == "50"
        assert at.keeper.conditions() == []

    play(scene)


@pytest.mark.parametrize("slow_s", [1.0, 3.0])
def test_a_command_about_a_server_holds_its_control_daemon_only_shortly(
    slow_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        at = Scene()
        control = await at.start("d1", StandIn())
        control.slow_s, now = slow_s, at.keeper._loop.time()
        monkeypatch.setattr(at.keeper._loop, "time", lambda: now)
        await at.by_hand("d1", control, "default_active_thread_percentage", "50")
        # A single miss says nothing: the machine can be slow.
        assert at.keeper.conditions() == []
        for _ in range(3):
            at.keeper.check(())
            assert at.tasks == set()
            now += keeping.RETRY_SERVER_S
            at.keeper.check(())
            await at.settled()
        asked = [deadline for text, deadline in control.deadlines if text == ASKED]
        assert asked[:4] == [0.25, 0.5, 1.0, 1.0 if slow_s == 1.0 else 2.0]
        assert {deadline for text, deadline in control.deadlines if "default" in text} == {keeping.COMMAND_S}
        if slow_s == 1.0:
            assert control.values["active_thread_percentage 100"] == "50.0"
            assert at.keeper.conditions() == []
        else:
            assert [c.detail for c in at.keeper.conditions()] == ["no answer within 2 s"]

    play(scene)


def test_a_lost_answer_is_not_taken_for_a_missing_limit() -> None:
    async def scene() -> None:
        at = Scene()
        control = await at.start("d1", StandIn())
        control.silent = keeping.TRIES - 1
        await at.by_hand("d1", control, "default_device_pinned_mem_limit 0", "2G")
        assert at.book.wanted(OWNER)[MEMORY] == "2048M" and at.rejected == 0

    play(scene)


def test_a_domain_whose_log_may_lack_commands_is_looked_at() -> None:
    async def scene() -> None:
        at = Scene()
        control = await at.start("d1", StandIn())
        control.set("default_active_thread_percentage", "50")
        at.keeper.check(["d1"])
        await at.settled()
        assert at.book.wanted(OWNER)[PERCENTAGE] == "50"
        # Not each second.
        control.set("default_active_thread_percentage", "40")
        at.keeper.check(["d1"])
        assert at.tasks == set()

    play(scene)
