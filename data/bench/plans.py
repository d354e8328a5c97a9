"""The calls of a trace under a chosen plan, under the heuristic and eagerly, in one run, beside what the planner expected.

A part of `make bench`. Each call is timed as in a profile: CUDA events on a GPU, the clock on a CPU, the device idle before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import mean, quantiles
from typing import Any

import torch

import omnigraph as og
from omnigraph._measure import time_once
from omnigraph.driving import sample
from omnigraph.profile import Profile

BLOCKS = 10  # of calls in turn: the ratio's spread is over these


@torch.no_grad()
def replayed(
    module: torch.nn.Module, trace: og.Trace, profile: Profile, calls: int = 2000, chunk: int = 25, context: int = 25
) -> dict[str, Any]:
    """Milliseconds of all three and bytes of both plans; the chosen one has half the heuristic's graphs. Each call is decoded in turn."""
    order = sample(trace.calls(chunk, context), calls)
    heuristic = og.BucketPlan.from_chunking(chunk, context)
    report = og.plan_buckets(Counter(order), profile, max_graphs=len(heuristic) // 2, baseline=heuristic)
    assert report.plan is not None
    plans = {"plan": report.plan, "heuristic": heuristic}
    decoders = {name: og.GraphedDecoder(module, plan, cost=profile.cost) for name, plan in plans.items()}
    for decoder in decoders.values():
        decoder.warmup(strict=True)
    ways = {**{name: decoder.decode for name, decoder in decoders.items()}, "eager": module}
    times: dict[str, list[float]] = {name: [] for name in ways}
    codes = decoders["plan"]._codes
    for shape in sorted(set(order)):  # kernels are picked, and routes found, before anything is timed
        for run in ways.values():
            run(codes(shape))
    for shape in order:
        drawn = codes(shape)
        for name, run in ways.items():
            times[name].append(time_once(run, drawn))
    block = max(len(order) // BLOCKS, 1)
    ratios = [sum(times["plan"][i : i + block]) / sum(times["heuristic"][i : i + block]) for i in range(0, len(order), block)]
    low, _, high = quantiles(ratios, n=4)
    expected = {"plan": report.chosen, "heuristic": report.heuristic, "eager": report.eager}
    found: dict[str, Any] = {
        "trace": trace.name,
        "calls": len(order),
        "time_ratio": sum(times["plan"]) / sum(times["heuristic"]),
        "low": low,
        "high": high,
        "predicted_time_ratio": report.chosen.ms / report.heuristic.ms,
        "predicted_memory_ratio": report.chosen.pool_bytes / report.heuristic.pool_bytes,
    }
    for name, measured in times.items():
        found[name] = {"ms": mean(measured), "predicted_ms": expected[name].ms}
    for name, decoder in decoders.items():
        found[name] |= {
            "buckets": [str(bucket) for bucket in decoder.captured],
            "pool_bytes": decoder.nbytes,
            "hit_rate": decoder.stats.hit_rate,
        }
        decoder.close()
    return found


def rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The two rows of the project's table."""
    plan, other = found["plan"], found["heuristic"]
    graphs = f"{len(plan['buckets'])} and {len(other['buckets'])} graphs"
    how = f"{plan['ms']:.3f} and {other['ms']:.3f} ms a call, {graphs}"
    memory = plan["pool_bytes"] / other["pool_bytes"]
    mib = f"{plan['pool_bytes'] / 2**20:,.0f} and {other['pool_bytes'] / 2**20:,.0f} MiB, {graphs}"
    return [
        {
            "row": "plans_time",
            "value": found["time_ratio"],
            "low": found["low"],
            "high": found["high"],
            "how": how,
            "predicted": found["predicted_time_ratio"],
        },
        {"row": "plans_memory", "value": memory, "low": memory, "high": memory, "how": mib, "predicted": found["predicted_memory_ratio"]},
    ]
