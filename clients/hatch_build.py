"""Build hook: puts the protocol and some values of mpsd into the package.

From the source tree they come from ../mpsd; in an sdist they are there already.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CARRIED = {
    "wire": "mpsd_client/_wire",
    "base/errors.py": "mpsd_client/_errors.py",
    "base/protection.py": "mpsd_client/_protection.py",
    "base/percentages.py": "mpsd_client/_percentages.py",
}


class CarryProtocol(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        for source, target in CARRIED.items():
            if not (root / target).exists():
                build_data["force_include"][str(root.parent / "mpsd" / source)] = target
