"""The GPUs whose device files exist here: in a container, those that its runtime gave it."""

from __future__ import annotations

from pathlib import Path


def present_gpus(root: Path = Path("/")) -> frozenset[str]:
    """Return the UUIDs of the GPUs with a device file, empty if that is not known.

    The driver lists GPUs in /proc/driver/nvidia/gpus, in containers too. It shows no UUID before it has
    initialised a GPU: the list then says nothing.
    """
    found = set()
    for path in (root / "proc/driver/nvidia/gpus").glob("*/information"):
        try:
            rows = dict(
                row.split(":", 1) for row in path.read_text(errors="replace").splitlines() if ":" in row
            )
        except OSError:
            return frozenset()
        uuid, minor = rows.get("GPU UUID", "").strip(), rows.get("Device Minor", "").strip()
        if not uuid.startswith("GPU-") or "?" in uuid or not minor.isdecimal():
            return frozenset()
        if (root / f"dev/nvidia{minor}").exists():
            found.add(uuid)
    return frozenset(found)
