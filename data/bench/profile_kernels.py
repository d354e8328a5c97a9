"""Where the time of a replay goes, kernel by kernel: torch.profiler over replays of Code2Wav's graphs, plain and compiled.

    python data/bench/profile_kernels.py OUT.json [--shapes 1x4 1x50 8x50] [--compiled 1x50]

Saved for each shape are the kernels with their number and microseconds a replay, longest first, under short names, and sums by kind.
Gaps between kernels are what `replay_us` (by CUDA events, without the profiler) has beyond them. On a CPU
(`--size small --device cpu`) the recorded operations stand in for kernels.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from bench_timing import in_turn
from torch.profiler import ProfilerActivity, profile

import omnigraph as og
from omnigraph._files import write_json
from omnigraph._provenance import provenance

SCHEMA = "omnigraph.bench.kernels/1"
METHOD = "torch.profiler over replays of a captured graph, after warm-up; microseconds of device time a replay; random codes"
MOST = 40  # kernels saved for each shape; the rest is one row
# The first that a name contains, in lower case, is its kind. Names of cuDNN, CUTLASS, ATen and Inductor's Triton kernels.
KINDS = {
    "memcpy": "copy",
    "memset": "copy",
    "flash": "attention",
    "fmha": "attention",
    "attention": "attention",
    "triton_": "fused by Inductor",
    "nchwtonhwc": "copy",
    "nhwctonchw": "copy",
    "im2col": "convolution",
    "col2im": "convolution",
    "dgrad": "convolution",
    "fprop": "convolution",
    "wgrad": "convolution",
    "conv": "convolution",
    "gemm": "product",
    "gemv": "product",
    "nvjet": "product",
    "splitk": "product",
    "addmm": "product",
    "::mm": "product",
    "bmm": "product",
    "copy": "copy",
    "pad": "copy",
    "reduce": "reduction",
    "norm": "reduction",
    "elementwise": "elementwise",
}


def kind_of(name: str) -> str:
    """What a kernel does, by its name.

    >>> kind_of("void at::native::vectorized_elementwise_kernel<4, at::native::sin_kernel_cuda>")
    'elementwise'
    """
    lower = name.lower()
    return next((kind for part, kind in KINDS.items() if part in lower), "other")


def short(name: str, most: int = 90) -> str:
    """A kernel's name without its arguments, and of its template arguments the first.

    >>> short("void at::native::elementwise_kernel<128, 4, f<x> >(int, f<x>)")
    'at::native::elementwise_kernel<128, 4, f<x> >'
    """
    name = re.sub(r"^void ", "", name)
    depth = 0
    for at, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and at and not name.startswith("(anonymous", at):
            name = name[:at]
            break
    return name if len(name) <= most else f"{name[: most - 3]}..."


def kernels(graph: og.CapturedGraph, codes: torch.Tensor, replays: int) -> list[dict[str, Any]]:
    """Name, kind, number and microseconds a replay of each kernel, longest first; what is beyond `MOST` is one row."""
    cuda = codes.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as taken:
        for _ in range(replays):
            graph.replay(codes)
        if cuda:
            torch.cuda.synchronize()
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in taken.key_averages():
        us = event.self_device_time_total if cuda else event.self_cpu_time_total
        if us > 0 and not event.key.startswith(("cuda", "cu", "Activity Buffer", "ProfilerStep")):
            sums[event.key][0] += event.count / replays
            sums[event.key][1] += us / replays
    rows = [{"name": short(name), "kind": kind_of(name), "count": n, "us": us} for name, (n, us) in sums.items()]
    rows.sort(key=lambda row: -row["us"])
    rest = rows[MOST:]
    if rest:
        number, took = (sum(row[key] for row in rest) for key in ("count", "us"))
        rows = [*rows[:MOST], {"name": f"{len(rest)} more", "kind": "other", "count": number, "us": took}]
    return rows


def profiled(decoder: og.GraphedDecoder, bucket: og.Bucket, replays: int) -> dict[str, Any]:
    """One bucket's graph: its kernels, and what a replay takes without the profiler."""
    graph, codes = decoder._live.graphs[bucket], decoder._codes(bucket.shape)
    took = in_turn({"replay": lambda: graph.replay(codes)}, codes.device, 20)["replay"]
    rows = kernels(graph, codes, replays)
    return {
        "bucket": str(bucket),
        "shape": bucket.shape,
        "compiled": bucket.compiled,
        "replay_us": {name: 1e3 * ms for name, ms in took.items()},
        "kernel_us": sum(row["us"] for row in rows),
        "kernels": sum(row["count"] for row in rows),
        "rows": rows,
    }


def shape(text: str) -> og.Shape:
    return og.Shape(*map(int, text.split("x")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--shapes", type=shape, nargs="*", default=[og.Shape(1, 4), og.Shape(1, 50), og.Shape(8, 50), og.Shape(8, 325)])
    parser.add_argument("--compiled", type=shape, nargs="*", default=[og.Shape(1, 50)] if torch.cuda.is_available() else [])
    parser.add_argument("--replays", type=int, default=5)
    args = parser.parse_args()
    module = og.models.code2wav(args.size, dtype=getattr(torch, args.dtype), device=args.device)
    results = []
    with og.GraphedDecoder(module, og.BucketPlan(tuple(args.shapes), compiled=tuple(args.compiled))) as decoder:
        decoder.warmup(strict=True)
        for bucket in decoder.captured:
            results.append(profiled(decoder, bucket, args.replays))
            row = results[-1]
            print(
                f"{bucket}: {row['kernels']:.0f} kernels, {row['kernel_us']:,.0f} us in them, {row['replay_us']['median']:,.0f} us a replay"
            )
            for one in row["rows"][:5]:
                print(f"  {one['us']:9.1f} us {one['count']:5.0f} {one['kind']:16} {one['name']}")
    print(write_json(args.out, SCHEMA, {"provenance": provenance(module, method=METHOD), "results": results}))


if __name__ == "__main__":
    main()
