#!/usr/bin/env python3
"""Training that is killed midway and resumes, bit for bit, from the GPU memory that it left.

    mpsd-run python resume_training.py          # trains three times and compares the results

The first run trains without interruption in ordinary memory. The second keeps parameters and momentum in a
buffer of mpsd's vault and is killed with SIGKILL midway. The third resumes from that buffer to the end. There
is no checkpoint: nothing is written to a disk, and nothing is copied to the host.

The state exists twice. A step reads one half and writes the other, and then writes in eight bytes which half
is valid, so a kill at any instant leaves a whole state. Needs PyTorch with CUDA, and mpsd with a vault.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
from typing import Any

import mpsd_client

WIDTH, HIDDEN, BATCH = 64, 256, 128
WEIGHTS = WIDTH * HIDDEN + HIDDEN + HIDDEN + 1
STATE = 2 * WEIGHTS
RATE, MOMENTUM = 0.05, 0.9
FIRST = 512
MISSING = 2


def load_torch() -> Any:
    try:
        import torch
    except ImportError:
        raise SystemExit("resume_training: this example needs PyTorch: pip install torch") from None
    if not torch.cuda.is_available():
        raise SystemExit("resume_training: PyTorch sees no GPU here (nvidia-smi, CUDA_VISIBLE_DEVICES)")
    torch.use_deterministic_algorithms(True)
    return torch


def loss_of(torch: Any, weights: Any, step: int) -> Any:
    """Return the loss of a small network on a batch that the step's number determines."""
    seeded = torch.Generator().manual_seed(step)
    points = torch.randn(BATCH, WIDTH, generator=seeded).cuda()
    wanted = points.square().mean(1, keepdim=True).sin()
    first, bias, second, last = weights.split([WIDTH * HIDDEN, HIDDEN, HIDDEN, 1])
    hidden = torch.tanh(points @ first.view(WIDTH, HIDDEN) + bias)
    return (hidden @ second.view(HIDDEN, 1) + last - wanted).square().mean()


def take_step(torch: Any, old: Any, new: Any, step: int) -> None:
    """Compute one step. `old` and `new`: the weights, followed by their momentum."""
    weights = old[:WEIGHTS].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(torch, weights, step), weights)
    new[WEIGHTS:] = MOMENTUM * old[WEIGHTS:] + gradient
    new[:WEIGHTS] = old[:WEIGHTS] - RATE * new[WEIGHTS:]


def begin(torch: Any, state: Any) -> None:
    seeded = torch.Generator().manual_seed(0)
    state[:WEIGHTS] = (torch.randn(WEIGHTS, generator=seeded) / WIDTH**0.5).cuda()
    state[WEIGHTS:] = 0


def digest(torch: Any, state: Any) -> str:
    return hashlib.sha256(state.cpu().numpy().tobytes()).hexdigest()


def without_a_break(steps: int) -> str:
    torch = load_torch()
    halves = torch.empty(2, STATE, device="cuda")
    begin(torch, halves[0])
    for step in range(steps):
        take_step(torch, halves[step % 2], halves[(step + 1) % 2], step)
    return digest(torch, halves[steps % 2])


def from_the_vault(name: str, steps: int, die_at: int | None) -> str:
    torch = load_torch()
    with mpsd_client.attach(name, FIRST + 2 * STATE * 4) as buffer:
        halves = torch.from_dlpack(buffer.view("float32", (2, STATE), offset=FIRST))
        done = int.from_bytes(buffer.read(8), "little") if buffer.found else 0
        if done == 0:
            begin(torch, halves[0])
        print(f"resume_training: from step {done}", file=sys.stderr)
        for step in range(done, steps):
            if step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            take_step(torch, halves[step % 2], halves[(step + 1) % 2], step)
            torch.cuda.synchronize()
            buffer.write((step + 1).to_bytes(8, "little"))
        found = digest(torch, halves[steps % 2])
        buffer.forget()
    return found


def child(*arguments: str) -> tuple[int, str]:
    # cuBLAS needs this setting to be deterministic.
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.strip()


def compare(name: str, steps: int) -> int:
    load_torch()
    mpsd_client.forget(name)
    common = ("--name", name, "--steps", str(steps))
    status, expected = child(*common, "--part", "whole")
    if status:
        return status
    status, _ = child(*common, "--part", "vault", "--die-at", str(steps // 2))
    if status != -signal.SIGKILL:
        print(f"resume_training: status {status}, expected a kill by SIGKILL", file=sys.stderr)
        return status or 1
    status, resumed = child(*common, "--part", "vault")
    if status:
        return status
    print(f"without a break    {expected}\nkilled and resumed {resumed}")
    print("the same, bit for bit" if resumed == expected else "DIFFERENT")
    return int(resumed != expected)


def main() -> int:
    parser = argparse.ArgumentParser(description="Training that is killed midway and resumes.")
    parser.add_argument("--name", default="resume-training", help="name of the buffer (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="number of steps (default: %(default)s)")
    parser.add_argument("--part", choices=("whole", "vault"), help="run only one of the trainings")
    parser.add_argument("--die-at", type=int, help="with --part vault: kill the process before this step")
    given = parser.parse_args()
    try:
        if given.part == "whole":
            print(without_a_break(given.steps))
        elif given.part == "vault":
            print(from_the_vault(given.name, given.steps, given.die_at))
        else:
            return compare(given.name, given.steps)
    except mpsd_client.MpsdError as error:
        print(f"resume_training: {error}", file=sys.stderr)
        return MISSING
    except SystemExit as missing:
        print(missing, file=sys.stderr)
        return MISSING
    return 0


if __name__ == "__main__":
    sys.exit(main())
