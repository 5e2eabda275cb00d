"""Every error that mpsd raises on purpose.

    MpsdError                 anything below; has a stable code, a message, a remedy, an exit code
      ConfigError             the configuration is wrong (names the key and the nearest valid one)
      UsageError              a command line or request that cannot be meant
      NotRunningError         no daemon answers on the socket
      AlreadyRunningError     another daemon owns this run directory
      DeniedError             the peer may not do this
      NotFoundError           no such client, domain, GPU or fault
      AmbiguousError          refused because the target could be something else (pid reuse, not a client)
      BusyError               too much is being asked at once; the same call may work later
      DeadlineError           an operation did not end in time
      ProtocolError           the peer sent something that is not the protocol
      GpuError                the driver, NVML or UVM refused; carries the raw status
        NotReadyError         not yet: the same call may work a moment later
        UnsupportedError      this machine cannot do it (capability loss, never a crash)
      ControlError            the stock control binary failed or answered nonsense
      StoreError              descriptors or state could not be put where they outlive mpsd

Library code raises; only the entry points turn an error into text and an exit status.
"""

from __future__ import annotations

from typing import ClassVar


class MpsdError(Exception):
    """An error with a stable code, the thing concerned and what to do about it."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class ConfigError(MpsdError):
    code = "config"
    exit_code = 2


class UsageError(MpsdError):
    code = "usage"
    exit_code = 2


class NotRunningError(MpsdError):
    code = "not-running"
    exit_code = 3


class AlreadyRunningError(MpsdError):
    code = "already-running"


class DeniedError(MpsdError):
    code = "denied"
    exit_code = 4


class NotFoundError(MpsdError):
    code = "not-found"


class AmbiguousError(MpsdError):
    code = "ambiguous"
    exit_code = 13


class DeadlineError(MpsdError):
    code = "deadline"
    exit_code = 12


class BusyError(MpsdError):
    code = "busy"


class ProtocolError(MpsdError):
    code = "protocol"


class GpuError(MpsdError):
    """The driver refused. `status` is the raw NV_STATUS, errno or NVML return value."""

    code = "gpu"

    def __init__(self, message: str, *, remedy: str = "", status: int = 0) -> None:
        super().__init__(message, remedy=remedy)
        self.status = status


class NotReadyError(GpuError):
    code = "not-ready"


class UnsupportedError(GpuError):
    code = "unsupported"


class ControlError(MpsdError):
    code = "control"


class StoreError(MpsdError):
    code = "store"
