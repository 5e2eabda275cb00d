"""Thread percentages at which cuBLAS computes wrong results, in a real mpsd. The simulated GPU has a made-up
table (mpsd/gpu/drivers/simulated.toml): 40 % is wrong, 39 % and 41 % are right."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from mpsd.base.conditions import degrading_texts
from mpsd.base.percentages import VARIABLE
from mpsd_client.joining.plan import make_plan
from tests.support.site import Site

CODE = "bad-thread-percentage"
NEAREST = "40 % is wrong, the nearest right percentages: 39 % and 41 %"


def bad(status: Mapping[str, Any]) -> list[str]:
    return [text for text in status["problems"] if "cuBLAS" in text]


def checks(site: Site) -> dict[str, Mapping[str, Any]]:
    return {row["name"]: row for row in site.ask(lambda client: client.doctor())}


def test_a_domain_with_a_wrong_limit_is_told_everywhere() -> None:
    with Site(limits__active_thread_percentage="40") as site:
        site.start()
        # Before any client: a program that is to run there is warned.
        warnings = make_plan({}, socket_path=site.socket).warnings
        assert [text for text in warnings if "the domain's limit" in text and NEAREST in text]
        status = site.until(bad, "the condition holds")
        assert "its limit" in bad(status)[0] and NEAREST in bad(status)[0]
        found = checks(site)
        assert found[CODE]["ok"] is False and NEAREST in found[CODE]["finding"] and found[CODE]["remedy"]
        assert (
            found["thread percentages"]["ok"] is True and "40, 43" in found["thread percentages"]["finding"]
        )
        # A program may lower its limit to a right percentage.
        own = make_plan({VARIABLE: "39"}, socket_path=site.socket).warnings
        assert not [text for text in own if "cuBLAS" in text]


def test_a_client_with_a_wrong_percentage_of_its_own_is_told(site: Site) -> None:
    assert not bad(site.status()) and CODE not in checks(site)
    warnings = make_plan({VARIABLE: "33.3"}, socket_path=site.socket).warnings
    assert [text for text in warnings if VARIABLE in text and "31 % and 34 %" in text]
    right = site.program(environ={**site.client_environ(), VARIABLE: "39"})
    wrong = site.program(environ={**site.client_environ(), VARIABLE: "40"})
    site.attached(right, wrong)
    (text,) = bad(site.until(bad, "the condition holds"))
    assert VARIABLE in text and NEAREST in text
    # A client may not degrade the status for all with a variable of its own.
    assert text not in degrading_texts(site.status()) and CODE not in checks(site)
    assert checks(site)["client-thread-percentage"]["ok"] is None
    wrong.die()
    site.gone(wrong)
    assert not bad(site.status())


def check_of(site: Site) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mpsd", "config", "check", str(site.config)]
    return subprocess.run(
        command, env=site.environ(), capture_output=True, text=True, timeout=60, check=False
    )


def test_a_check_of_the_configuration_warns() -> None:
    with Site(limits__active_thread_percentage="33.3") as idle:
        done = check_of(idle)
        assert done.returncode == 0 and done.stdout.startswith(f"{idle.config}: ok")
        assert "33.3 % is wrong, the nearest right percentages: 31 % and 34 %" in done.stderr
        idle.write_config(limits__active_thread_percentage="50")
        done = check_of(idle)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_limit_set_by_hand_is_judged() -> None:
    with Site() as site:
        site.start().join()
        (domain,) = {client["domain"] for client in site.status()["clients"]}
        site.control(domain, "set_default_active_thread_percentage 40")
        site.until(bad, "the condition holds")
        site.control(domain, "set_default_active_thread_percentage 50")
        site.until(lambda status: not bad(status), "the condition has ended")
