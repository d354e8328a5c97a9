"""How the scripts of this folder and `tests/bench` take times, and how they name what they save."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import quantiles
from typing import Any

import torch

from omnigraph._provenance import device_name


def spread(times: Sequence[float]) -> dict[str, float]:
    low, middle, high = quantiles(times, n=4)
    return {"median": middle, "q1": low, "q3": high}


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall(device: torch.device, call: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds from an idle device to an idle device, and what the call returned."""
    sync(device)
    start = time.perf_counter()
    result = call()
    sync(device)
    return (time.perf_counter() - start) * 1e3, result


def on_device(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds from launch to end of a call, by CUDA events; by the clock on a CPU. Eager calls are bound by their launches."""
    if device.type != "cuda":
        return wall(device, call)[0]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def in_turn(
    ways: Mapping[str, Callable[[], object]], device: torch.device, repeats: int, timer: Callable[..., float] = on_device
) -> dict[str, dict[str, float]]:
    """Milliseconds of each of `ways`, taken in turn so that a drift of clocks meets all alike; the first two rounds are left out."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 2):
        for name, call in ways.items():
            times[name].append(timer(call, device))
    return {name: spread(taken[2:]) for name, taken in times.items()}


def slug(device: torch.device) -> str:
    """What a file is named for: "h200", "cpu".

    >>> slug(torch.device("cpu"))
    'cpu'
    """
    if device.type != "cuda":
        return device.type
    return re.sub(r"[^a-z0-9]+", "-", device_name(device).lower().removeprefix("nvidia ")).strip("-")
