"""The audit log of a running mpsd: one line for each act of force, change of a setting, and refused right."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import mpsd_client
from mpsd.os import procfs
from tests.support.site import OTHER_UID, Site, until


def lines(site: Site, action: str) -> list[dict[str, Any]]:
    return [line for line in site.said("audit") if line["action"] == action]


def one(site: Site, action: str) -> dict[str, Any]:
    (line,) = lines(site, action)
    return line


def assert_asked(line: dict[str, Any], uid: int) -> None:
    """Check that a line names this test's process as the requester, with its pid and cgroup as claims."""
    assert line["logger"] == "mpsd.audit"
    assert line["by"] == "peer" and line["peer_uid"] == uid and line["claimed_pid"] == os.getpid()
    assert line["claimed_cgroup"] == procfs.unified_cgroup(os.getpid())


def test_acts_on_request_are_audited(site: Site) -> None:
    site.write_config(protect='"guard"')
    site.start()
    client = site.join()
    site.ask(lambda c: c.kill(client.pid, reason="a test"))
    assert client.wait() != 0
    evict, kill = one(site, "evict"), one(site, "kill")
    for line in (evict, kill):
        assert_asked(line, os.geteuid())
        assert (line["pid"], line["uid"], line["reason"]) == (client.pid, os.geteuid(), "a test")
        assert "leased" in line["proof"] and line["start_ticks"] and line["domain"]
    assert (evict["outcome"], kill["outcome"]) == ("begun", "sent")
    assert kill["steps"][-1] == "SIGKILL"

    site.ask(lambda c: c.drain())
    line = one(site, "setting")
    assert line["outcome"] == "drained" and line["gpus"]
    assert_asked(line, os.geteuid())
    site.ask(lambda c: c.undrain())
    domain = next(d["id"] for d in site.status()["domains"] if d["state"] == "active")
    site.control(domain, "set_default_active_thread_percentage 40")
    kept = until(lambda: lines(site, "setting")[2:], "the setting is kept")
    assert [(k["outcome"], k["by"], k["setting"]) for k in kept] == [
        ("kept", "control socket", "set_default_active_thread_percentage 40")
    ]
    second = site.join()
    site.ask(lambda c: c.zone_policy(second.pid, "freeze"))
    policy = one(site, "policy")
    assert_asked(policy, os.geteuid())
    assert (policy["outcome"], policy["pid"]) == ("freeze", second.pid)


def test_acts_of_policy_name_their_fault(site: Site) -> None:
    site.write_config(domains__kill_victims_after_s="0.1")
    site.start()
    victim, offender = site.join(), site.join()
    offender.order("dev.launch('store') or dev.synchronize()")
    record = until(site.faults, "the fault is recorded")[0]
    assert victim.wait() != 0
    line = next(line for line in lines(site, "kill") if line["pid"] == victim.pid)
    assert (line["by"], line["outcome"]) == ("policy", "sent")
    assert (line["fault"], line["fault_class"]) == (record["id"], record["class"])
    assert len([line for line in lines(site, "kill") if line["pid"] == victim.pid]) == 1


def test_refused_rights_cause_one_line(site: Site) -> None:
    """S7: a stranger's refused requests are one line for each operation, not one for each request."""
    site.start()
    client = site.join()

    def refused(op: str, **arguments: Any) -> None:
        for _ in range(20):
            with contextlib.suppress(mpsd_client.MpsdError):
                site.ask(lambda c: c.call(op, arguments), OTHER_UID)

    refused("drain")
    refused("kill", pid=client.pid)
    # A pid that is no client of anybody is a mistake, not a refused right.
    refused("kill", pid=os.getpid())
    drain, kill = lines(site, "right")
    assert (drain["operation"], kill["operation"]) == ("drain", "kill")
    for line in (drain, kill):
        assert line["outcome"] == "refused" and line["reason"]
        assert_asked(line, OTHER_UID)
    assert not lines(site, "kill") and not lines(site, "evict")
