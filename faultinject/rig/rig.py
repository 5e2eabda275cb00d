"""The rig of one run: a directory, a node, a service, worker programs. All of it ends with the run.

Every process starts in a session of its own. At the end each living process that knows the run's directory is
reported as left behind, and killed.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from faultinject.registry.history import History
from faultinject.registry.kinds import AUTO, KMOD
from faultinject.rig import leftovers
from faultinject.rig.libraries import Libraries
from faultinject.rig.logdisk import SmallDisk
from faultinject.rig.node import Node, open_node
from faultinject.rig.service import MpsdService, Service, StockService
from faultinject.rig.stockcontrol import StockControl
from faultinject.rig.worker import Worker, python_environment
from mpsd.base.model import IsolationMode

GRACE_S = 3.0


class Rig:
    """Use as a context: entering starts the node and the service. Raises MpsdError."""

    def __init__(
        self,
        backend: str | Node,
        mode: str,
        history: History,
        *,
        small_disk: bool = False,
        settings: Mapping[str, str] | None = None,
        logs_to: Path | None = None,
        libraries: Libraries | None = None,
    ) -> None:
        """`libraries`: the proxy, for programs that need it."""
        self.mode, self.history = mode, history
        self.base = Path(tempfile.mkdtemp(prefix="mpsd-fi-", dir="/tmp"))
        self._backend, self._logs_to = backend, logs_to
        self._closers: list[Callable[[], None]] = []
        self._small_disk = small_disk
        self.libraries = libraries
        self.workers: list[Worker] = []
        self.leftovers: list[str] = []
        self.disk: SmallDisk | None = None
        self.service_kind: type[MpsdService] = MpsdService
        self.service_environment: Mapping[str, str] = {}
        self._settings = settings or {}

    def __enter__(self) -> Rig:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        if isinstance(self._backend, Node):
            node = self._backend
        else:
            node = open_node(self._backend, self.base)
            self._closers.append(node.close)
        part = {"kernel.isolation": '"isolate"' if self.mode == KMOD else '"off"'}
        # Campaigns measure domains that run.
        start = {} if self.mode == AUTO else {"domains.start": '"at-once"'}
        defaults = dict(node.settings)
        if self.mode == AUTO:
            defaults.pop("protect", None)
            defaults |= self.libraries.driver_settings() if self.libraries else {}
        settings = {**defaults, **part, **start, **self._settings}
        self.node = replace(node, settings=settings)
        if self.mode == "stock" and node.backend.isolation is not None:
            # An earlier run may have left the module isolating, and this one has to choose the mode.
            node.backend.isolation.set_mode(IsolationMode.OFF)
        logs = self.base / "l"
        if self._small_disk:
            self.disk = SmallDisk(logs)
            self._closers.append(self.disk.close)
        self.service: Service = (
            StockService(self.node, self.base, logs)
            if self.mode == "stock"
            else self.service_kind(self.node, self.base, logs, self.history, self.service_environment)
        )
        self._closers.append(self._stop_service)
        self.service.start()

    def _stop_service(self) -> None:
        # The logs of the small disk disappear when it is unmounted.
        if self._logs_to is not None and self.disk is not None:
            self._keep_logs(self._logs_to)
        self.leftovers += self.service.stop()

    @property
    def mpsd(self) -> MpsdService:
        """The daemon, in a mode that has one."""
        assert isinstance(self.service, MpsdService)
        return self.service

    @property
    def has_mpsd(self) -> bool:
        return isinstance(self.service, MpsdService)

    def environment(self) -> dict[str, str]:
        """Return the environment of processes that join no domain."""
        no_domain = {"CUDA_MPS_PIPE_DIRECTORY": str(self.base / "none")}
        return python_environment() | dict(self.node.environment) | no_domain

    def spawn(
        self,
        name: str,
        module: str,
        *args: str,
        environment: Mapping[str, str] | None = None,
        through: Sequence[str] = (),
        device: str | None = None,
    ) -> Worker:
        """Start a worker program, a client of the service unless another environment is given.

        `through`: a command that becomes the program, as mpsd-run does. `device`: the GPU that it opens, if
        not the node's (programs/devices/base.py).
        """
        env = self.service.client_environment() if environment is None else environment
        log = self.base / f"{name}.err"
        # The tag identifies every descendant, even one that changes its environment.
        tagged = {**env, "MPSD_FAULTINJECT_RUN": str(self.base)}
        args = (*args, "--backend", device or self.node.name)
        worker = Worker(name, module, args, tagged, self.history, log, through=through)
        self.workers.append(worker)
        return worker

    def other_control(self) -> StockControl:
        """Start a control daemon beside the service, on the same GPU, with a domain of its own."""
        environ = python_environment() | dict(self.node.environment)
        other = StockControl(self.node.backend.control_binary, self.base / "o", environ)
        self._closers.append(other.stop)
        other.start()
        return other

    def error_text(self, worker: Worker, most: int = 400) -> str:
        """Return the end of a program's standard error."""
        try:
            return self.base.joinpath(f"{worker.name}.err").read_text(errors="replace").strip()[-most:]
        except OSError:
            return ""

    def note(self, **facts: Any) -> None:
        self.history.add("rig", "note", **facts)

    def end_workers(self) -> None:
        for worker in self.workers:
            worker.signal(signal.SIGCONT)
            worker.end()

    def close(self) -> None:
        """End everything, in the reverse order of its start. Safe to call twice."""
        self.end_workers()
        while self._closers:
            closer = self._closers.pop()
            try:
                closer()
            except Exception as error:  # the rest must still be ended
                self.leftovers.append(f"{getattr(closer, '__qualname__', closer)}: {error}")
        self.leftovers += leftovers.clear(self.base, GRACE_S)
        if self._logs_to is not None:
            self._keep_logs(self._logs_to)
        shutil.rmtree(self.base, ignore_errors=True)

    def _keep_logs(self, target: Path) -> None:
        """Copy the logs of this run before they are removed."""
        target.mkdir(parents=True, exist_ok=True)
        for found in (*self.base.glob("*.log"), *self.base.glob("*.err"), *self.base.glob("l/**/*.log")):
            name = "-".join(found.relative_to(self.base).parts)
            shutil.copyfile(found, target / name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
