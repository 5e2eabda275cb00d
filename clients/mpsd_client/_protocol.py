"""Where the protocol comes from: the copy in an installed mpsd-client, or mpsd itself in the source tree.

One definition for daemon and client, and a client that can be installed without the daemon: the build
copies mpsd/wire to mpsd_client/_wire and mpsd/errors.py to mpsd_client/_errors.py (hatch_build.py).
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING or importlib.util.find_spec("mpsd_client._wire") is None:
    from mpsd import errors
    from mpsd.wire import address, messages, session, zmtp
else:
    from mpsd_client import _errors as errors
    from mpsd_client._wire import address, messages, session, zmtp

__all__ = ["address", "errors", "messages", "session", "zmtp"]
