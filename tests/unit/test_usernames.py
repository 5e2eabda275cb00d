"""Names of users are shown without waiting for a directory that does not answer."""

from __future__ import annotations

import os
import pwd
import threading

from mpsd.usernames import UserNames, user_name

ANSWER_S = 10.0


def test_a_user_of_this_machine_is_named_at_once() -> None:
    assert UserNames(wait_s=ANSWER_S).of(os.getuid()) == pwd.getpwuid(os.getuid()).pw_name


def test_one_without_a_name_is_its_number() -> None:
    assert user_name(3_999_999_999) == "3999999999"


def test_a_directory_that_hangs_is_waited_for_once() -> None:
    free, answered = threading.Event(), threading.Event()
    asked: list[int] = []

    def hangs(uid: int) -> str:
        asked.append(uid)
        free.wait(ANSWER_S)
        answered.set()
        return "somebody"

    names = UserNames(hangs, wait_s=0.0)
    assert [names.of(7), names.of(7)] == ["7", "7"]
    free.set()
    assert answered.wait(ANSWER_S)
    while names.of(7) == "7":
        pass
    assert names.of(7) == "somebody"
    assert asked == [7]
