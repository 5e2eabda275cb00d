"""The training of transformer.py, whose parameters go through NCCL after each step, with one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import torch
from torch import distributed

from faultinject.programs.basics.pytorch import DEVICE, as_bytes, wait
from faultinject.programs.workloads.training import transformer
from faultinject.programs.workloads.training.transformer import PER_STEP, UNIT, UNTIMED

__all__ = ["PER_STEP", "UNIT", "UNTIMED", "start"]


class Training(transformer.Training):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        with tempfile.NamedTemporaryFile() as file:
            distributed.init_process_group(
                "nccl", init_method=f"file://{file.name}-nccl", rank=0, world_size=1
            )
        size = sum(parameter.numel() for parameter in self.model.parameters())
        self.gathered = torch.zeros(size, device=DEVICE)

    def step(self) -> None:
        super().step()
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])
        distributed.all_gather_into_tensor(self.gathered, flat)
        distributed.all_reduce(flat)
        wait()

    def results(self) -> Iterator[bytes]:
        yield from super().results()
        yield as_bytes(self.gathered)

    def close(self) -> None:
        super().close()
        distributed.destroy_process_group()


def start(seed: int, backend: str) -> Training:
    return Training(seed)
