"""How many descriptors this process may have: RLIMIT_NOFILE, getrlimit(2)."""

from __future__ import annotations

import resource

# Children inherit it, and old daemons close every number below it one by one when they start.
MOST = 1 << 20
# For MPS with all the clients it may have; and for two domains with a few.
WANTED, LEAST = 16384, 256
REMEDY = "LimitNOFILE= in the unit, or ulimit -n as root"


def raise_limit() -> int:
    """Raise the soft limit to the hard one, or to MOST where that is lower; the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return soft
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if wanted <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        # fs.nr_open may be lower still: what there is has to do, and `doctor` shows it.
        return soft
    return wanted
