"""A Listener on an event loop of its own, in a thread, for tests that talk to it over real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mpsd.base.errors import DeniedError, NotFoundError
from mpsd.peers import Limits, Listener, Peer
from mpsd.wire import zmtp
from mpsd.wire.messages import MAX_ANSWER_BYTES, Request

DEADLINE_S = 60.0
Event = tuple[int, frozenset[int], Mapping[str, object]]


class RunningListener:
    """A context: a listener that answers like a small daemon. Client 4711 belongs to `owner`."""

    def __init__(
        self, path: Path, limits: Limits | None = None, history: Sequence[Event] = (), owner: int = 0
    ) -> None:
        self.path = path
        self.seen: list[tuple[Peer, Request]] = []
        self.release = asyncio.Event()
        self.finished = threading.Event()
        self._owner = owner
        self._history = history
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self.listener = Listener(path, self._handle, "mpsd", history=self._kept, limits=limits)

    def _kept(self, since: int) -> list[Event]:
        return [event for event in self._history if event[0] > since]

    async def _handle(self, peer: Peer, request: Request) -> Mapping[str, object]:
        self.seen.append((peer, request))
        match request.op:
            case "kill" if request.args["pid"] != 4711:
                raise NotFoundError("not a client", remedy="look again")
            case "kill" if not peer.admin and peer.uid != self._owner:
                raise DeniedError("not yours", remedy="ask its owner")
            case "kill" if request.args.get("reason") == "wait":
                await self.release.wait()
                self.finished.set()
            case "doctor":
                await self.release.wait()
            case "faults":
                return {"faults": [{"text": "x" * 1000}] * int(request.args.get("limit", 1))}
            case "explain":
                raise RuntimeError("a mistake of ours")
            case "drain":
                return {"unsayable": object()}
        return {"op": request.op, "uid": peer.uid, "gid": peer.gid, "pid": peer.pid, "admin": peer.admin}

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def publish(self, events: Sequence[Event]) -> None:
        async def all_at_once() -> None:
            for seq, owners, event in events:
                self.listener.publish(event, owners, seq)

        self.call(all_at_once())

    def let_go(self) -> None:
        """End the requests that wait for `release`."""
        self._loop.call_soon_threadsafe(self.release.set)

    def __enter__(self) -> RunningListener:
        self._thread.start()
        try:
            self.call(self.listener.start())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call(self.listener.close())
        self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()


class RawClient:
    """A socket that sends any bytes."""

    def __init__(self, path: Path, *, handshake: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(str(path))
        self.zmtp = zmtp.Connection(zmtp.DEALER, MAX_ANSWER_BYTES)
        self._frames: list[bytes] = []
        if handshake:
            try:
                self._shake_hands()
            except BaseException:
                self.socket.close()
                raise

    def _shake_hands(self) -> None:
        while self.zmtp.phase is not zmtp.Phase.OPEN:
            self.socket.sendall(self.zmtp.to_send())
            data = self.socket.recv(4096)
            if not data:
                raise ConnectionResetError
            self.zmtp.receive(data)
        self.socket.sendall(self.zmtp.to_send())

    def send(self, payload: bytes) -> None:
        self.socket.sendall(frame(payload))

    def receive(self) -> bytes:
        """Return one frame. Raises EOFError if the daemon closes the connection."""
        while not self._frames:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self._frames += self.zmtp.receive(data)
        return self._frames.pop(0)

    def until_closed(self) -> None:
        """Read until the daemon closes the connection. Raises TimeoutError if the daemon does not."""
        end = time.monotonic() + DEADLINE_S
        try:
            while self.socket.recv(65536):
                if time.monotonic() > end:
                    raise TimeoutError("still open")
        except ConnectionError:
            pass

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()


def frame(payload: bytes, flags: int = 0) -> bytes:
    """Return a ZMTP frame in its long form."""
    return struct.pack(">BQ", flags | 2, len(payload)) + payload


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
