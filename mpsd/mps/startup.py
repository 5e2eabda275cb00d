"""The start of a domain's server: active, or ended with the server's own words.

The stock control daemon accepts start_server and answers nothing when that server then ends. It only writes
its log. A line there makes mpsd look for the server among the children of the control daemon, so a forged
line ends no start. The text of the error comes from the log.
"""

from __future__ import annotations

import asyncio
import contextlib

from mpsd.base.errors import ControlError
from mpsd.base.text import printable
from mpsd.mps import log as mpslog
from mpsd.mps.control import ControlDaemon

STATUS_PATIENCE_S = 0.25
_LOOK_AGAIN_S = 0.05
_WORDS = 300


class ServerEndedError(ControlError):
    """The server of a domain ended while it started."""


class StartWatch:
    """The signs in a domain's log of how the start of its server goes."""

    def __init__(self) -> None:
        self._sign = asyncio.Event()
        self._failed = False
        self._ended: mpslog.ServerExited | None = None
        self._words = ""
        self._last: tuple[int | None, str] = None, ""

    def feed(self, line: mpslog.LogLine) -> None:
        match line.event:
            case mpslog.StartFailed():
                self._words = line.text
                self._failed = True
            case mpslog.ServerExited() as ended:
                self._ended = ended
            case _:
                self._last = line.writer, line.text
                return
        self._sign.set()

    async def until_active(self, control: ControlDaemon, deadline_s: float) -> None:
        """Wait until the server, which was asked for, is active.

        Raises ServerEndedError as soon as it has ended, DeadlineError.
        """
        active = asyncio.ensure_future(control.wait_active(deadline_s))
        try:
            while not active.done():
                sign = asyncio.ensure_future(self._sign.wait())
                # After the first sign the server may take a moment to end.
                pause = _LOOK_AGAIN_S if self._failed else None
                await asyncio.wait({active, sign}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                sign.cancel()
                told = self._sign.is_set() or self._failed
                self._sign.clear()
                if told and not active.done() and not control.server_instances():
                    await self._until_status()
                    raise ServerEndedError(self._obituary(), remedy="see mpsd-ctl doctor and control.log")
            await active
        finally:
            active.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await active

    async def _until_status(self) -> None:
        """Wait for the line with the exit status, which the control daemon writes last."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STATUS_PATIENCE_S):
                while self._ended is None:
                    await self._sign.wait()
                    self._sign.clear()

    def _obituary(self) -> str:
        ended = self._ended
        if ended is None:
            return f"the server ended: {printable(self._words, _WORDS)}"
        words = self._words or (self._last[1] if self._last[0] == ended.pid else "")
        text = f"server {ended.pid} ended with status {ended.status}"
        return f"{text}: {printable(words, _WORDS)}" if words else text
