"""The state machines, as tables: what is not written here cannot happen.

A domain is STARTING until its control daemon answers, then WARM (a spare, its server running) until a
slot makes it ACTIVE. It leaves ACTIVE for one of four reasons, and never returns, with one exception:
FAULTED (a client's fault took the server), POISONED (a dead client's kernel never ends), RETIRED (the
server died or the slot moved on) and HEADLESS (the control daemon died; clients may live on). In each
of them it drains by itself; when the last living client has gone it is STOPPING, then forgotten. The
exception: in compute mode EXCLUSIVE_PROCESS no second server can exist, so a faulted domain that has
emptied is used again (RECOVERED).

A client is NOTICED when the control log names it and its process is pinned; ATTACHED once its address
space is leased. One that cannot be attached is UNPROTECTED and lives on: protection lost is shown, the
client is never harmed for it. Eviction goes TERMINATING -> KILLING, or straight to KILLING where asking
would stall everybody. A dead client with a lease is LINGERING until its work has ended; HELD when it
never does. Leaving the table (GONE) is the only way out.
"""

from __future__ import annotations

from enum import StrEnum

from mpsd.core.state import ClientState as C
from mpsd.core.state import DomainState as D


class DomainTrigger(StrEnum):
    STARTED = "started"
    START_FAILED = "start failed"
    ACTIVATED = "activated"
    FAULT = "fault"
    RECOVERED = "recovered"
    POISON = "poison"
    SERVER_DIED = "server died"
    CONTROL_DIED = "control died"
    RETIRE = "retire"
    EMPTY = "empty"


class ClientTrigger(StrEnum):
    ATTACHED = "attached"
    ATTACH_FAILED = "attach failed"
    EVICT = "evict"
    KILL = "kill"
    DIED = "died"
    ENDLESS = "endless"
    RELEASED = "released"


T = DomainTrigger
DOMAIN_TABLE: dict[D, dict[DomainTrigger, D]] = {
    D.STARTING: {T.STARTED: D.WARM, T.START_FAILED: D.FAILED, T.RETIRE: D.RETIRED},
    D.WARM: {
        T.ACTIVATED: D.ACTIVE,
        T.FAULT: D.FAULTED,
        T.POISON: D.POISONED,
        T.SERVER_DIED: D.RETIRED,
        T.CONTROL_DIED: D.HEADLESS,
        T.RETIRE: D.RETIRED,
    },
    D.ACTIVE: {
        T.FAULT: D.FAULTED,
        T.POISON: D.POISONED,
        T.SERVER_DIED: D.RETIRED,
        T.CONTROL_DIED: D.HEADLESS,
        T.RETIRE: D.RETIRED,
    },
    D.FAULTED: {
        T.RECOVERED: D.ACTIVE,
        T.EMPTY: D.STOPPING,
        T.SERVER_DIED: D.RETIRED,
        T.CONTROL_DIED: D.HEADLESS,
    },
    D.POISONED: {
        T.FAULT: D.FAULTED,
        T.EMPTY: D.STOPPING,
        T.SERVER_DIED: D.RETIRED,
        T.CONTROL_DIED: D.HEADLESS,
    },
    D.RETIRED: {T.FAULT: D.FAULTED, T.POISON: D.POISONED, T.EMPTY: D.STOPPING, T.CONTROL_DIED: D.HEADLESS},
    D.HEADLESS: {T.EMPTY: D.STOPPING},
    D.STOPPING: {},
    D.FAILED: {T.EMPTY: D.STOPPING},
}

K = ClientTrigger
CLIENT_TABLE: dict[C, dict[ClientTrigger, C | None]] = {
    C.NOTICED: {
        K.ATTACHED: C.ATTACHED,
        K.ATTACH_FAILED: C.UNPROTECTED,
        K.EVICT: C.TERMINATING,
        K.KILL: C.KILLING,
        K.DIED: None,
    },
    C.ATTACHED: {K.EVICT: C.TERMINATING, K.KILL: C.KILLING, K.DIED: C.LINGERING},
    C.UNPROTECTED: {
        K.ATTACHED: C.ATTACHED,
        K.EVICT: C.TERMINATING,
        K.KILL: C.KILLING,
        K.DIED: None,
    },
    C.TERMINATING: {K.ATTACHED: C.TERMINATING, K.KILL: C.KILLING, K.DIED: C.LINGERING},
    C.KILLING: {K.ATTACHED: C.KILLING, K.DIED: C.LINGERING},
    C.LINGERING: {K.ENDLESS: C.HELD, K.RELEASED: None},
    C.HELD: {K.RELEASED: None},
}
"""None: the client is forgotten. A client that dies without a lease is forgotten whatever its state."""


def next_domain_state(state: D, trigger: DomainTrigger) -> D | None:
    """The state that follows, or None when the trigger means nothing in this state."""
    return DOMAIN_TABLE[state].get(trigger)


def allows(state: C, trigger: ClientTrigger) -> bool:
    return trigger in CLIENT_TABLE[state]


def next_client_state(state: C, trigger: ClientTrigger) -> C | None:
    """The state that follows (None: forgotten). Raises KeyError for an impossible trigger."""
    return CLIENT_TABLE[state][trigger]
