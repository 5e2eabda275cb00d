"""State machines of domains and clients, as tables. A transition that is not listed cannot happen.

A domain is STARTING until its control daemon answers. Then it is WARM (a standby domain with a running
server) until a slot makes it ACTIVE. An ACTIVE domain may have no server yet: its control daemon starts the
server for the first client (mpsd.core.slots). A domain leaves ACTIVE for one of five states:

- FULL: it has as many clients as it takes. They work on, and new clients go to the next domain.
- FAULTED: the fault of a client took the server.
- POISONED: a kernel of an exited client never ends.
- RETIRED: the server died, clients cannot connect to it any more, the slot moved on, or a standby domain
  became a trial domain.
- HEADLESS: the control daemon died; clients may live on.

In each of them the domain drains. When the last living client has ended, the domain is STOPPING, then
forgotten. A domain returns to ACTIVE in two cases only:

- RECOVERED: in compute mode EXCLUSIVE_PROCESS no second server can exist, so an empty faulted one is reused.
- ACTIVATED: a full domain with places again is reused if its slot may have no further full domain.

A client is NOTICED when the control log names it and its process is pinned. It is ATTACHED once its address
space is leased. A client that cannot be attached is UNPROTECTED: status shows the lost protection, and the
client runs on. Eviction goes from TERMINATING to KILLING, or straight to KILLING if terminate_client would
stall other clients. An exited client with a lease is LINGERING until its work has ended, and HELD if the work
never ends. A client with no next state is forgotten.
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
    UNREACHABLE = "unreachable"
    RETIRE = "retire"
    FULL = "full"
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
        T.UNREACHABLE: D.RETIRED,
        T.RETIRE: D.RETIRED,
    },
    D.ACTIVE: {
        T.FAULT: D.FAULTED,
        T.POISON: D.POISONED,
        T.SERVER_DIED: D.RETIRED,
        T.CONTROL_DIED: D.HEADLESS,
        T.UNREACHABLE: D.RETIRED,
        T.RETIRE: D.RETIRED,
        T.FULL: D.FULL,
    },
    D.FULL: {
        T.ACTIVATED: D.ACTIVE,
        T.FAULT: D.FAULTED,
        T.POISON: D.POISONED,
        T.SERVER_DIED: D.RETIRED,
        T.CONTROL_DIED: D.HEADLESS,
        T.RETIRE: D.RETIRED,
        T.EMPTY: D.STOPPING,
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
"""None: the client is forgotten. A client that exits without a lease is forgotten in any state."""


def next_domain_state(state: D, trigger: DomainTrigger) -> D | None:
    """Return the next state, or None if the trigger has no meaning in this state."""
    return DOMAIN_TABLE[state].get(trigger)


def allows(state: C, trigger: ClientTrigger) -> bool:
    return trigger in CLIENT_TABLE[state]


def next_client_state(state: C, trigger: ClientTrigger) -> C | None:
    """Return the next state (None: forgotten). Raises KeyError for an impossible trigger."""
    return CLIENT_TABLE[state][trigger]
