"""python -m libcuda_build --out DIRECTORY [--standin] [--sanitize address,undefined|thread]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from libcuda_build.compile import BuildError, build_proxy, build_standin


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m libcuda_build", description="Build the libcuda proxy.")
    parser.add_argument("--out", type=Path, required=True, help="folder for libcuda.so.1; created if missing")
    parser.add_argument("--standin", action="store_true", help="build the stand-in driver, not the proxy")
    parser.add_argument("--sanitize", default="", help="value for gcc's -fsanitize=")
    parser.add_argument("--include", type=Path, help="folder of cuda.h; default: the PyPI package's")
    given = parser.parse_args()
    build = build_standin if given.standin else build_proxy
    try:
        print(build(given.out, sanitize=given.sanitize, include=given.include))
    except BuildError as error:
        print(f"libcuda_build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
