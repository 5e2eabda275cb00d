"""Build hook: generate, compile and pack libcuda.so.1. The wheel is specific to the machine's
architecture."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuildLibrary(BuildHookInterface):  # type: ignore[type-arg]
    _made: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        sys.path.insert(0, self.root)
        from libcuda_build.compile import build_proxy

        self._made = Path(tempfile.mkdtemp(prefix="mpsd-libcuda-wheel-"))
        build_proxy(self._made)
        for library in sorted(self._made.iterdir()):
            build_data["force_include"][str(library)] = f"mpsd_libcuda/lib/{library.name}"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)
