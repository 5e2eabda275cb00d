#!/usr/bin/env python3
"""A cache in GPU memory that survives its own process: after kill -9 and a new start every entry is there.

    mpsd-run python cache_service.py        # then lines: put KEY VALUE, get KEY, count, forget, quit

The vault of mpsd keeps the memory (enabled = true under [vault] in mpsd.toml). Without a vault the service
works too, and says once that nothing will survive. It needs a GPU and the standard library: it moves bytes
with read() and write(), where a real service would run kernels on the memory.

An entry is written before the count that makes it valid, so a kill at any instant leaves whole entries.
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
    """Entries in the order of their writes; the last entry of a key is the valid one."""

    def __init__(self, buffer: mpsd_client.Buffer) -> None:
        self.buffer = buffer
        self.room = (buffer.nbytes - FIRST) // ENTRY.size
        self.places: dict[str, int] = {}
        magic, self.count = HEADER.unpack(buffer.read(HEADER.size))
        if magic.rstrip(b"\0") != MAGIC:
            # All zeros: the first process ended before its first write.
            if magic.strip(b"\0"):
                raise SystemExit(f"cache_service: {buffer.name!r} is not a cache: choose another --name")
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
            return "error: a key has at most 64 bytes, a value 448"
        if self.count == self.room:
            return f"error: the cache is full ({self.room} entries): use a larger --mib and another --name"
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
                answer = "ok: the memory ends with this process"
            case ["quit"]:
                return
            case _:
                answer = "error: use put KEY VALUE, get KEY, count, forget, or quit"
        print(answer, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="A cache in GPU memory that survives its own process.")
    parser.add_argument("--name", default="cache", help="name of the buffer (default: %(default)s)")
    parser.add_argument("--mib", type=int, default=2, help="size in MiB (default: %(default)s)")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the GPU (default: %(default)s)")
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
