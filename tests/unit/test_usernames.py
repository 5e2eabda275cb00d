"""User names are shown without waiting for a directory service that does not answer."""

from __future__ import annotations

import os
import pwd
import threading
import time

from mpsd.api import usernames
from mpsd.api.usernames import UserNames, user_name

ANSWER_S = 10.0


def until(names: UserNames, uid: int, name: str) -> None:
    end = time.monotonic() + ANSWER_S
    while names.of(uid) != name:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_user_of_this_machine_is_named_once_the_database_has_answered() -> None:
    until(UserNames(), os.getuid(), pwd.getpwuid(os.getuid()).pw_name)


def test_one_without_a_name_is_its_number() -> None:
    assert user_name(3_999_999_999) == "3999999999"


def test_who_was_foreseen_is_asked_for_once_and_nobody_waits() -> None:
    free, began = threading.Event(), threading.Event()
    asked: list[int] = []

    def hangs(uid: int) -> str:
        asked.append(uid)
        began.set()
        assert free.wait(ANSWER_S)
        return "somebody"

    names = UserNames(hangs)
    names.prefetch(7)
    assert began.wait(ANSWER_S)
    assert [names.of(7), names.of(7)] == ["7", "7"]
    free.set()
    until(names, 7, "somebody")
    assert asked == [7]


def test_many_users_of_a_directory_that_hangs_take_few_threads() -> None:
    free, began = threading.Event(), threading.Semaphore(0)

    def hangs(uid: int) -> str:
        began.release()
        assert free.wait(ANSWER_S)
        return f"user{uid}"

    before = threading.active_count()
    names = UserNames(hangs, threads=2)
    for uid in range(30):
        assert names.of(uid) == str(uid)
    for _ in range(2):
        assert began.acquire(timeout=ANSWER_S)
    assert threading.active_count() <= before + 2
    free.set()
    for uid in range(30):
        until(names, uid, f"user{uid}")


def test_a_name_can_be_foreseen_for_everybody() -> None:
    usernames.prefetch(os.getuid())
    end = time.monotonic() + ANSWER_S
    while user_name(os.getuid()) != pwd.getpwuid(os.getuid()).pw_name:
        assert time.monotonic() < end
        time.sleep(0.001)
