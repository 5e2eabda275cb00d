"""Import of the protocol modules: their copies in an installed mpsd-client, or mpsd's own in the source tree.

Daemon and client share one definition, and the client installs without the daemon: its build (hatch_build.py)
copies mpsd/wire to mpsd_client/_wire, and files of mpsd/base to modules of the same name with an underscore.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING or importlib.util.find_spec("mpsd_client._wire") is None:
    from mpsd.base import errors, percentages
    from mpsd.base.protection import Protection, ProtectionLevel
    from mpsd.wire import address, messages, session, zmtp
else:
    from mpsd_client import _errors as errors
    from mpsd_client import _percentages as percentages
    from mpsd_client._protection import Protection, ProtectionLevel
    from mpsd_client._wire import address, messages, session, zmtp

__all__ = ["Protection", "ProtectionLevel", "address", "errors", "messages", "percentages", "session", "zmtp"]
