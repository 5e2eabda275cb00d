"""Every error that mpsd raises on purpose.

    MpsdError                 base class: has a stable code, a message, a remedy, an exit code
      ConfigError             the configuration is wrong (names the key and the nearest valid key)
      UsageError              the command line or the request is invalid
      NotRunningError         no daemon answers on the socket
      AlreadyRunningError     another daemon owns this run directory
      DeniedError             the peer lacks the permission for this operation
      NotFoundError           no such client, domain, GPU or fault
      AmbiguousError          refused: the target may be another process (pid reuse, not a client)
      BusyError               too many requests at once; the same call may succeed later
      DeadlineError           an operation did not end in time
      ProtocolError           the peer violated the protocol
      GpuError                the driver, NVML or UVM refused; carries the raw status
        NotReadyError         the same call may succeed a moment later
          RefusedError        a new client must not join this GPU now
        UnsupportedError      this machine cannot do it (loss of a capability, never a crash)
      ControlError            the stock control binary failed or gave an unknown answer
      StoreError              descriptors or state could not be stored where they outlive mpsd

Library code raises; only the entry points turn an error into text and an exit status.
"""

from __future__ import annotations

from typing import ClassVar


class MpsdError(Exception):
    """Base of all deliberate errors: a stable code, a message that names its subject, and a remedy."""

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
    """Report a refusal by the driver. `status` is the raw NV_STATUS, errno or NVML return value."""

    code = "gpu"

    def __init__(self, message: str, *, remedy: str = "", status: int = 0) -> None:
        super().__init__(message, remedy=remedy)
        self.status = status


class NotReadyError(GpuError):
    code = "not-ready"


class RefusedError(NotReadyError):
    code = "refused"
    exit_code = 69


class UnsupportedError(GpuError):
    code = "unsupported"


class ControlError(MpsdError):
    code = "control"


class StoreError(MpsdError):
    code = "store"
