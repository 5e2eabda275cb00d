#!/usr/bin/env python3
"""A cache in GPU memory that survives its own death: kill -9 it, start it again, and every entry is there.

    mpsd-run python cache_service.py        # then, a line each: put KEY VALUE, get KEY, count, forget, quit

mpsd with a vault keeps the memory meanwhile (enabled = true under [vault] in its configuration). Without one
it works all the same, and says once that nothing will survive. The standard library and a GPU are all it
needs: the bytes go to and fro with read() and write(); a real service would have its kernels look there.

An entry is written before the count that makes it valid, so a death at any instant leaves whole entries.
"""

from __future__ import annotations

import argparse
import struct
import sys
import warnings

import mpsd_client

MAGIC = b"mpsdcache1"
HEADER = struct.Struct("<16sQ")
ENTRY = struct.Struct("<64s448s")
FIRST = 512


class Cache:
    """Entries in the order in which they were put; the last of a key is the one that counts."""

    def __init__(self, buffer: mpsd_client.Buffer) -> None:
        self.buffer = buffer
        self.room = (buffer.nbytes - FIRST) // ENTRY.size
        self.places: dict[str, int] = {}
        magic, self.count = HEADER.unpack(buffer.read(HEADER.size))
        if magic.rstrip(b"\0") != MAGIC:
            # Zeros: its first process ended before it had written anything.
            if magic.strip(b"\0"):
                raise SystemExit(f"cache_service: {buffer.name!r} is no cache: choose another --name")
            self.count = 0
            self._commit()
        for place in range(self.count):
            self.places[self._entry(place)[0]] = place

    def _commit(self) -> None:
        self.buffer.write(HEADER.pack(MAGIC, self.count))

    def _entry(self, place: int) -> tuple[str, str]:
        key, value = ENTRY.unpack(self.buffer.read(ENTRY.size, FIRST + place * ENTRY.size))
        return key.rstrip(b"\0").decode(), value.rstrip(b"\0").decode()

    def put(self, key: str, value: str) -> str:
        if len(key.encode()) > 64 or len(value.encode()) > 448:
            return "error: a key has up to 64 bytes, a value 448"
        if self.count == self.room:
            return f"error: full, with {self.room} entries"
        self.buffer.write(ENTRY.pack(key.encode(), value.encode()), FIRST + self.count * ENTRY.size)
        self.places[key] = self.count
        self.count += 1
        self._commit()
        return "ok"

    def get(self, key: str) -> str:
        place = self.places.get(key)
        return "none" if place is None else self._entry(place)[1]


def serve(cache: Cache) -> None:
    for line in sys.stdin:
        match line.rstrip("\n").split(" ", 2):
            case ["put", key, value] if key:
                answer = cache.put(key, value)
            case ["get", key]:
                answer = cache.get(key)
            case ["count"]:
                answer = str(len(cache.places))
            case ["forget"]:
                cache.buffer.forget()
                answer = "ok: it ends with this process"
            case ["quit"]:
                return
            case _:
                answer = "error: put KEY VALUE, get KEY, count, forget, or quit"
        print(answer, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="A cache in GPU memory that survives its own death.")
    parser.add_argument("--name", default="cache", help="of the buffer (default: %(default)s)")
    parser.add_argument("--mib", type=int, default=2, help="its size (default: %(default)s)")
    parser.add_argument("--device", type=int, default=0, help="the GPU (default: %(default)s)")
    given = parser.parse_args()
    warnings.simplefilter("always")
    try:
        with mpsd_client.session() as session:
            session.on_event(lambda event: print(f"mpsd: {event}", file=sys.stderr, flush=True))
            buffer = session.attach(given.name, given.mib << 20, device=given.device)
            cache = Cache(buffer)
            kept = "kept" if buffer.persistent else "not kept"
            print(f"ready: {len(cache.places)} entries, {kept}", flush=True)
            serve(cache)
    except mpsd_client.MpsdError as error:
        print(f"cache_service: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
