"""A program in a domain of its own: what it waits at a fault elsewhere is how long the GPU stood still."""

from __future__ import annotations

from faultinject.rig import Rig
from mpsd.errors import DeadlineError

UP_S, REPORT_S = 60.0, 20.0
# The GPU stands still for longer the more channels there are (reports, -stall): it adds few of its own.
FEW_CHANNELS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


class Bystander:
    """In the domain that all users share, without mpsd's libcuda. The methods raise DeadlineError."""

    def __init__(self, rig: Rig) -> None:
        service = rig.mpsd
        shared = service.ask(lambda c: c.env(shared=True))
        environment = {**service.environment, **shared, **FEW_CHANNELS}
        # Where nothing stands still, its work takes no more than it needs to show that it goes on.
        pause = ("--pause-ms", "5") if rig.node.name == "simulated" else ()
        self._worker = rig.spawn("bystander", "server", *pause, environment=environment)
        self._reports = 0

    def ready(self) -> None:
        self._worker.must("ready", timeout=UP_S)

    def stall(self, since: float = 0.0) -> tuple[float, int]:
        """Its longest step after that moment (by the harness's clock) and since it was last asked, in ms, and
        how many of its results were wrong."""
        self._worker.tell("report")
        said = self._worker.wait("report", "gone", timeout=REPORT_S, after=self._reports)
        self._reports += 1
        if said is None or said.what == "gone":
            raise DeadlineError("the bystander was lost, or says nothing")
        longest = [end - start for start, end in said.data["longest"] if end > since]
        return round(max(longest, default=0.0) * 1e3, 3), int(said.data["wrong"])

    def end(self) -> None:
        self._worker.tell("stop")
        self._worker.must("done", "gone", timeout=REPORT_S)
