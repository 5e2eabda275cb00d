"""The report's entries of a program: the data of its processes, with figures, findings and a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from faultinject.campaigns.proxy.judge import (
    AUTO,
    DEFAULT_BAR,
    STEP_BAR,
    TRAINING_BAR,
    Pair,
    Ratio,
    Side,
    Within,
    check,
    memory_ratio,
    ratio,
    verdict,
)
from faultinject.programs.workloads import HIDDEN, MAPPED, TRAININGS
from faultinject.registry.verdicts import Verdict


def figures(pair: Pair, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures beside the raw numbers; None for what was not measured."""
    plain, proxied = pair.plain, pair.proxied
    step_plain = statistics.median(plain.blocks) if plain.blocks else None
    step_proxied = statistics.median(proxied.blocks) if proxied.blocks else None
    found, noise = ratio(proxied.blocks, plain.blocks), ratio(pair.again.blocks, plain.blocks)
    # Older reports have no such figures.
    within = pair.within
    more: dict[str, Any] = {}
    if within:
        more = {"within_ratio": _data(within.ratio()), "within_noise": _data(within.noise())}
        more["within_error"] = within.error()
        cpu = within.cpu_ratio()
        more |= {"within_cpu": _data(cpu)} if cpu else {}
    return {
        "step_ms_plain": None if step_plain is None else round(step_plain * 1e3, 4),
        "step_ms_proxied": None if step_proxied is None else round(step_proxied * 1e3, 4),
        "per_second_plain": facts["per_step"] / step_plain if step_plain else None,
        "per_second_proxied": facts["per_step"] / step_proxied if step_proxied else None,
        "step_ratio": _data(found),
        "noise_ratio": _data(noise),
        "memory_ratio": memory_ratio(proxied, plain),
        "memory_noise": memory_ratio(pair.again, plain),
        **more,
    }


def _data(found: Ratio | None) -> dict[str, Any] | None:
    return asdict(found) if found else None


def step_bar(mode: str, program: str) -> float:
    """Return the limit on the step time: mode exact saves what a training step writes."""
    if mode == AUTO:
        return DEFAULT_BAR
    return TRAINING_BAR if mode == "exact" and program in TRAININGS else STEP_BAR


def judged(entry: Mapping[str, Any], *, bars: bool) -> dict[str, Any]:
    """Return the entry with its figures, findings and verdict, computed from its own numbers."""
    if entry["not_run"]:
        return {**entry, "figures": None, "verdict": None, "findings": []}
    sides = {name: Side.of(entry[name]) for name in ("plain", "again", "proxied")}
    bar = step_bar(entry["mode"], entry["program"])
    pair = Pair(
        entry["mode"],
        **sides,
        untimed=entry["untimed"],
        step_bar=bar,
        mapped=entry["program"] in MAPPED,
        hidden=entry["program"] in HIDDEN,
        within=Within.of(entry["within"]) if entry.get("within") else None,
    )
    findings = check(pair, bars=bars)
    return {
        **entry,
        "figures": figures(pair, entry),
        "verdict": verdict(findings).value,
        "findings": [asdict(f) for f in findings if f.verdict is not Verdict.VALID],
    }


def progress(entry: Mapping[str, Any], took_s: float) -> str:
    name = f"{entry['program']} ({entry['mode']})"
    if entry["not_run"]:
        return f"{name}: not run: {entry['not_run']}"
    why = "".join(f"\n    {f['law']}: {f['text']}" for f in entry["findings"])
    figures = entry["figures"]
    step = figures.get("within_ratio") or figures["step_ratio"]
    times = f", step time x {step['median']:.4f}" if step else ""
    return f"{name}: {entry['verdict']}{times}, {took_s:.1f} s{why}"
