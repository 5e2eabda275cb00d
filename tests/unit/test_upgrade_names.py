"""No name that the source of revision 50d9fcb fixed has gone: events, values, counters, variables.

tests/integration/test_upgrade.py compares the names that only a running daemon shows.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.support.site import ROOT
from tests.support.upgradefixtures import names
from tests.support.upgradenames import PREFIX, static_names

RENAMED = {
    "values of Again": "values of ReplayMode",
    "values of LiesThere": "values of AddressKind",
    "values of Spared": "values of Reclaimable",
    "values of Whose": "values of ExceptionOwner",
}
"""Classes with another name now. Their values must be the same."""

EXCEPTIONS = {
    # A phrase of `mpsd-ctl faults --explain`. No record, answer or file has it.
    ("values of Scope", "nobody"),
    # A phrase in the text of a finding of `mpsd-ctl doctor`. The keys and verdicts are the same.
    ("values of Owner", "files whose owner cannot be told"),
    # Read for one release more, with a line that says what to write (test_config_protect.py).
    ("variables of the configuration", "MPSD_FAILOVER_ENABLED"),
    ("variables of the configuration", "MPSD_GUARD_FOLLOW_INTERVAL_S"),
    ("variables of the configuration", "MPSD_JOURNAL_EVIDENCE_WINDOW_S"),
    ("variables of the configuration", "MPSD_LEASE_PROBE_INTERVAL_MS"),
    ("variables of the configuration", "MPSD_VAULT_ENABLED"),
    # Only the harness set these two, for its own daemon. MPSD_DEBUG=die_before_effect=N replaces both.
    ("variables of mpsd", "MPSD_DIE_BEFORE_EFFECT"),
    ("variables of mpsd", "MPSD_FAULTINJECT"),
}
"""Values that may have gone, with the reason."""

RECORDED = {part.removeprefix(PREFIX): wanted for part, wanted in names().items() if part.startswith(PREFIX)}


@cache
def present() -> dict[str, list[str]]:
    return {part.removeprefix(PREFIX): found for part, found in static_names(ROOT).items()}


@pytest.mark.parametrize("part", RECORDED)
def test_no_recorded_name_has_gone(part: str) -> None:
    now = set(present().get(RENAMED.get(part, part), ()))
    gone = {name for name in RECORDED[part] if name not in now and (part, name) not in EXCEPTIONS}
    assert RECORDED[part] and not gone


def test_every_exception_is_needed() -> None:
    assert not RENAMED.keys() & present().keys()
    for part, name in EXCEPTIONS:
        assert name in RECORDED[part] and name not in present()[part]


def test_every_kind_of_event_has_its_fields_recorded() -> None:
    """The events `fault` and `failover` are records, and test_upgrade.py compares the keys of records."""
    kinds = {field.partition(".")[0] for field in RECORDED["event fields"]}
    assert kinds == set(RECORDED["event kinds"]) - {"fault", "failover"}
    assert len(kinds) == 23
