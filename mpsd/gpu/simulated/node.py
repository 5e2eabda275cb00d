"""Configuration of a simulated node: its GPUs, chosen once when its GPU process starts."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass, replace

from mpsd.base.errors import UsageError
from mpsd.base.model import Gpu

DRIVER_VERSION = "580.159.04"
DEFAULT_MEMORY_BYTES = 16 << 30
_NAME = "Simulated GPU"


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """gpus: number; memory_bytes: of each; seed: of random delays; compute_mode: of each GPU; isolation: the
    driver has the kernel module; isolation_deadline_s: time that the module waits for mpsd."""

    gpus: int = 1
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    seed: int = 0
    compute_mode: str = "default"
    isolation: bool = False
    isolation_deadline_s: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= 16:
            raise UsageError(
                f"a simulated node has 1 to 16 GPUs, not {self.gpus}", remedy="choose a number in that range"
            )
        if self.memory_bytes < 1 << 30:
            raise UsageError("a simulated GPU has at least 1 GiB of memory", remedy="use 1 GiB or more")

    def save(self, directory: str) -> None:
        with open(os.path.join(directory, "node.json"), "w", encoding="ascii") as file:
            json.dump({name: getattr(self, name) for name in self.__slots__}, file)

    @classmethod
    def load(cls, directory: str) -> NodeConfig:
        """Return the saved configuration, or the default. Raises UsageError for a damaged file."""
        path = os.path.join(directory, "node.json")
        try:
            with open(path, encoding="ascii") as file:
                return replace(cls(), **json.load(file))
        except FileNotFoundError:
            return cls()
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"{path} is damaged: {error}", remedy="remove it and start the node again"
            ) from error


def gpu(index: int, memory_bytes: int) -> Gpu:
    """Return the GPU with this number: the same uuid and PCI address on every node."""
    name = uuid.uuid5(uuid.NAMESPACE_OID, f"mpsd simulated gpu {index}")
    return Gpu(index, f"GPU-{name}", _NAME, f"0000:{index + 1:02x}:00.0", memory_bytes)
