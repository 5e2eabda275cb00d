"""`mpsd-faultinject try`: the kinds that it offers, and its question before a real GPU is touched."""

from __future__ import annotations

from typing import Any

import pytest

from faultinject.__main__ import main
from faultinject.campaigns import tryout
from faultinject.programs.injection.inject import action_of
from faultinject.registry import kinds
from mpsd.base.errors import BusyError, UsageError


def test_each_offered_kind_is_committed_by_one_client() -> None:
    found = tryout.offered()
    assert {"store", "trap", "endless", "zone_past_end", "sigkill_idle"} <= set(found)
    assert not set(found) & set(kinds.PARTS + kinds.CIRCUMSTANCE + kinds.IDENTITY)
    assert not {"zone_absorb", "zone_freeze", "zone_restart", "zone_sparse", "zone_host"} & set(found)
    assert all(action_of(kind) == kind and fault.kind == kind for kind, fault in found.items())


def test_an_unknown_kind_gets_the_nearest_one_and_the_list() -> None:
    with pytest.raises(UsageError) as raised:
        tryout.named("stor")
    assert raised.value.remedy.startswith("did you mean 'store'? kinds: store, load, ")
    with pytest.raises(UsageError) as raised:
        tryout.named("server_death")
    assert "kinds: store, load, " in raised.value.remedy


def test_it_asks_before_it_touches_a_real_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Daemon:
        def __enter__(self) -> Daemon:
            return self

        def __exit__(self, *_: object) -> None: ...

        def version(self) -> dict[str, str]:
            return {"backend": "nvidia"}

    def refuse(**asked: Any) -> None:
        assert asked["yes"] is False
        raise BusyError("faults would be injected into it", remedy=asked["instead"])

    monkeypatch.setattr(tryout.mpsd_client, "connect", Daemon)
    monkeypatch.setattr(tryout.consent, "require_on_gpu", refuse)
    monkeypatch.setattr(tryout, "Worker", None)
    assert main(["try", "trap"]) == BusyError.exit_code
    assert "mpsd run --backend simulated" in capsys.readouterr().err
