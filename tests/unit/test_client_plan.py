"""Refusals of the daemon, and the level that remains: the client's side of the `env` reply."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import MpsdError
from mpsd.base.protection import Protection, ProtectionLevel
from mpsd.ctl import __main__ as ctl
from mpsd_client import RefusedError, run
from mpsd_client.client import Client
from mpsd_client.joining import plan
from mpsd_client.joining.plan import LevelError, make_plan

GPUS = [{"index": 0, "uuid": "GPU-a", "name": "H200"}]
REPLY: dict[str, Any] = {
    "env": {"CUDA_MPS_PIPE_DIRECTORY": "/run/mpsd/s/a-u0"},
    "domain": "d1",
    "gpus": ["GPU-a"],
    "gpu_index": 0,
    "vault": "/run/mpsd/vault.sock",
    "failover": "/run/mpsd/failover.sock",
}


class Answers:
    """A daemon that answers `gpus` and `env`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, proxy: Path) -> None:
        self.reply = dict(REPLY)
        self.error: MpsdError | None = None
        self.environ = {"MPSD_LIBCUDA_DIR": str(proxy), "MPSD_REAL_LIBCUDA": "/bin/true"}

        def call(op: str, *_: object, **__: object) -> dict[str, Any]:
            if op == "env" and self.error is not None:
                raise self.error
            return {"gpus": GPUS} if op == "gpus" else self.reply

        @contextmanager
        def connect(path: str | None) -> Iterator[Client]:
            client = object.__new__(Client)
            client.call = call  # type: ignore
            yield client

        monkeypatch.setattr(plan, "connect", connect)
        monkeypatch.setattr(plan, "obstacle", lambda path: "")

    def plan(self, **options: str) -> plan.Plan:
        return make_plan(self.environ, **options)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Answers:
    (tmp_path / "libcuda.so.1").touch()
    return Answers(monkeypatch, tmp_path)


@pytest.mark.parametrize("code", list(Code))
def test_a_condition_that_refuses_clients_is_an_error_with_its_remedy(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: Code
) -> None:
    condition = Condition(code, "0", "Xid 79")
    answers.error = RefusedError(condition.text, remedy=condition.remedy)
    with pytest.raises(RefusedError) as refused:
        answers.plan()
    assert (str(refused.value), refused.value.exit_code) == (f"{condition.text} ({condition.remedy})", 69)
    for name, value in answers.environ.items():
        monkeypatch.setenv(name, value)
    assert run.main(["/bin/true"]) == 69
    told = (
        f"{condition.text}; {condition.remedy}; true was not started (--allow-unprotected starts it outside"
    )
    assert capfd.readouterr().err == f"mpsd-run: {told} mpsd)\n"
    assert run.main(["--env"]) == 69
    assert capfd.readouterr().out == "false\n"


LOW = {"level": "guard", "why": "snapshot needs 14 GiB, has 8", "remedy": "use less memory"}


def test_the_level_of_the_reply_counts(answers: Answers) -> None:
    answers.reply["protection"] = {"level": "failover", "why": "", "remedy": ""}
    full = answers.plan()
    assert full.protection == Protection(ProtectionLevel.FAILOVER)
    assert full.line == "protected (guard + failover), GPU 0, domain d1"
    answers.reply["protection"] = LOW
    low = answers.plan()
    assert low.line == (
        "protected (guard; no fail-over: snapshot needs 14 GiB, has 8), GPU 0, domain d1; use less memory"
    )
    # What keeps the level down now can end while the program runs.
    assert full.variables == low.variables and low.variables["MPSD_PROTECTION"] == "failover"
    with pytest.raises(LevelError, match="--protect failover: the level offered is guard: snapshot") as high:
        answers.plan(protect="failover")
    assert (high.value.exit_code, high.value.remedy) == (69, "use less memory")
    with pytest.raises(LevelError, match="--require failover: the program would have guard: snapshot"):
        answers.plan(require="failover")
    assert answers.plan(require="guard").line == low.line
    lower = answers.plan(protect="observe")
    assert lower.line == (
        "not protected from faults of other programs (observe: --protect observe), GPU 0, domain d1"
    )


@pytest.mark.parametrize(
    ("mode", "level"), [("", "failover"), ("exact", "failover"), ("keep", "guard"), ("off", "guard")]
)
def test_the_mode_that_a_program_asks_for_counts(answers: Answers, mode: str, level: str) -> None:
    answers.reply["protection"] = {"level": "failover", "why": "", "remedy": ""}
    answers.environ["MPSD_FAILOVER"] = mode
    found = answers.plan()
    assert found.protection is not None and found.protection.level == level
    # Mode keep still needs the socket.
    assert found.variables["MPSD_FAILOVER_SOCKET"] == REPLY["failover"]
    if level == "guard":
        assert f"(guard; no fail-over: MPSD_FAILOVER is {mode})" in found.line
        assert found.line.endswith("; unset MPSD_FAILOVER")
        with pytest.raises(LevelError, match=f"would have guard: MPSD_FAILOVER is {mode}"):
            answers.plan(require="failover")


def test_a_level_without_its_socket_is_not_believed(answers: Answers) -> None:
    answers.reply |= {"protection": {"level": "failover", "why": "", "remedy": ""}, "failover": ""}
    found = answers.plan().protection
    assert found is not None and (found.level, bool(found.remedy)) == (ProtectionLevel.GUARD, True)
    answers.reply["vault"] = ""
    found = answers.plan().protection
    assert found is not None and found.level is ProtectionLevel.OBSERVE


def test_the_commands_say_that_they_wait(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def waited(ask: Any, path: str | None, wait_s: float, tell: Any) -> Any:
        tell(f"waiting up to {wait_s:g} s")
        return ask(path)

    monkeypatch.setattr(plan, "until_answered", waited)
    assert run.main(["-q", "--env"]) == 0
    assert capfd.readouterr().err == "mpsd-run: waiting up to 10 s\n"
    assert ctl.main(["env", "-q"]) == 0
    assert capfd.readouterr().err == "mpsd-ctl: waiting up to 10 s\n"


def test_the_remedy_for_a_missing_library_suits_the_gpu_and_names_a_wrong_folder(answers: Answers) -> None:
    answers.environ["MPSD_LIBCUDA_DIR"] = "/nonexistent"
    found = answers.plan().protection
    assert found is not None and found.why == "no libcuda.so.1 in MPSD_LIBCUDA_DIR=/nonexistent"
    del answers.environ["MPSD_LIBCUDA_DIR"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "find_proxy", lambda *_: None)
        assert "; install mpsd-libcuda " in answers.plan().line
        answers.reply["backend"] = "simulated"
        line = answers.plan().line
    assert "install mpsd-libcuda" not in line and "mpsd help quickstart" in line
