"""A program in a domain of its own: its longest step at a fault elsewhere is the GPU stall."""

from __future__ import annotations

from faultinject.rig.rig import Rig
from mpsd.base.errors import DeadlineError

UP_S, REPORT_S = 60.0, 20.0
# The GPU stall grows with the number of channels (evidence/mechanisms.md), so it adds few.
FEW_CHANNELS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


class Bystander:
    """A program in the domain that all users share, without the proxy. The methods raise DeadlineError."""

    def __init__(self, rig: Rig) -> None:
        service = rig.mpsd
        shared = service.ask(lambda c: c.env(shared=True))
        environment = {**service.environment, **shared, **FEW_CHANNELS}
        # Without a stall to measure, its work takes only the processor time that shows progress.
        pause = ("--pause-ms", "5") if rig.node.name == "simulated" else ()
        self._worker = rig.spawn("bystander", "server", *pause, environment=environment)
        self._reports = 0

    def ready(self) -> None:
        self._worker.require("ready", timeout=UP_S)

    def stall(self, since: float = 0.0) -> tuple[float, int]:
        """Return its longest step [ms] after that moment and since the last report, and its wrong results."""
        self._worker.tell("report")
        message = self._worker.wait("report", "gone", timeout=REPORT_S, after=self._reports)
        self._reports += 1
        if message is None or message.what == "gone":
            raise DeadlineError("the bystander was lost, or does not answer")
        longest = [end - start for start, end in message.data["longest"] if end > since]
        return round(max(longest, default=0.0) * 1e3, 3), int(message.data["wrong"])

    def end(self) -> None:
        self._worker.tell("stop")
        self._worker.require("done", "gone", timeout=REPORT_S)
