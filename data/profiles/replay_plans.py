"""Does the planner predict what a decoder does? Decode calls of a trace under the chosen plan, the heuristic and eagerly, in one run.

    python data/profiles/replay_plans.py TRACE.csv data/profiles/h200_code2wav_bf16.json data/bench/h200_plans_bf16.json

Calls are drawn from the trace's histogram, each decoded in turn under every plan, so that drift of clocks meets all alike. Each is
timed as in the profile: CUDA events on a GPU, the clock on a CPU, the device idle before. About two minutes for 2,000 calls on an H200.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from statistics import mean, quantiles

import torch
from tqdm.auto import tqdm

import omnigraph as og
from omnigraph._files import write_json
from omnigraph._measure import time_once
from omnigraph._provenance import provenance
from omnigraph.driving import sample
from omnigraph.planner import plan_buckets
from omnigraph.profile import Profile

SCHEMA = "omnigraph.bench.plans/1"
METHOD = "calls drawn from the trace, each decoded under every plan in turn; CUDA events, an idle device before each; means over the calls"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("profile", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=("default", "small"), default="default")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--graphs", type=int, default=3)
    parser.add_argument("--chunk-size", type=int, default=25)
    parser.add_argument("--left-context-size", type=int, default=25)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    profile, trace = Profile.load(args.profile), og.Trace.load(args.trace)
    dtype = getattr(torch, profile.made_for["dtype"])
    module = og.models.code2wav(args.size, dtype=dtype, device=args.device)
    profile.check(module)
    order = sample(trace.calls(args.chunk_size, args.left_context_size), args.calls)
    calls = Counter(order)
    heuristic = og.BucketPlan.from_chunking(args.chunk_size, args.left_context_size)
    report = plan_buckets(calls, profile, max_graphs=args.graphs, baseline=heuristic)
    print(report, "\n")
    plans = {"plan": report.plan, "heuristic": heuristic}
    decoders = {name: og.GraphedDecoder(module, plan, cost=profile.cost) for name, plan in plans.items() if plan is not None}
    for decoder in decoders.values():
        print(decoder.warmup(strict=True))
    ways = {**{name: decoder.decode for name, decoder in decoders.items()}, "eager": module}
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for shape in sorted(calls):  # kernels are picked, and routes found, before anything is timed
            for run in ways.values():
                run(next(iter(decoders.values()))._codes(shape))
        for shape in tqdm(order, unit="call"):
            codes = next(iter(decoders.values()))._codes(shape)
            for name, run in ways.items():
                times[name].append(time_once(run, codes))
    predicted = {"plan": report.chosen, "heuristic": report.heuristic, "eager": report.eager}
    rows = []
    for name, measured in times.items():
        row = {
            "plan": name,
            "buckets": " ".join(map(str, decoders[name].plan.buckets)) if name in decoders else "",
            "predicted_ms": predicted[name].ms,
            "measured_ms": mean(measured),
            "measured_quartiles": quantiles(measured, n=4),
            "ratio": mean(measured) / predicted[name].ms,
            "hit_rate": decoders[name].stats.hit_rate if name in decoders else 0.0,
            "pool_bytes": decoders[name].nbytes if name in decoders else 0,
            "predicted_pool_bytes": predicted[name].pool_bytes,
        }
        rows.append(row)
        print(f"{name}: predicted {row['predicted_ms']:.3f} ms a call, measured {row['measured_ms']:.3f} ({row['ratio']:.3f} times)")
    content = {"provenance": provenance(module, method=METHOD), "trace": trace.name, "calls": len(order), "rows": rows}
    print(write_json(args.out, SCHEMA, content))


if __name__ == "__main__":
    main()
