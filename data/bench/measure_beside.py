"""Measure decoding of Code2Wav on a GPU beside what one would otherwise use: eager, torch.compile, make_graphed_callables, a plain graph.

    python data/bench/measure_beside.py OUT.json [--dtype bfloat16]

All ways are measured in this one process, each call of each in turn. Steady state: milliseconds of a call from an idle device to an
idle device. Start-up: seconds from the module to the first result of a way, at one shape.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor

import omnigraph as og
from omnigraph._provenance import provenance

SHAPES = [(1, 4), (1, 25), (1, 50), (8, 50)]
COMPILED = [(1, 25), (1, 50)]  # seconds each to compile
LONG = 3000  # frames of one long decode in chunks of 300 with 25 frames of left context
METHOD = "one process; wall-clock between synchronisations, all ways in turn, after warm-up; medians and quartiles; random codes"
Call = Callable[[Tensor], Tensor]


def spread(times: list[float]) -> dict[str, float]:
    low, middle, high = quantiles(times, n=4)
    return {"median": middle, "q1": low, "q3": high}


def timed(call: Callable[[], object]) -> float:
    """Milliseconds from an idle device to an idle device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def eager(module: torch.nn.Module, codes: Tensor) -> Call:
    return module


def reduce_overhead(module: torch.nn.Module, codes: Tensor) -> Call:
    """`torch.compile` with its own graphs, its result copied out as a decoder's must be."""
    compiled = torch.compile(module, mode="reduce-overhead", dynamic=False)
    for _ in range(3):
        compiled(codes)
    return lambda codes: compiled(codes).clone()


def graphed_callables(module: torch.nn.Module, codes: Tensor) -> Call:
    """`torch.cuda.make_graphed_callables`, which wraps a module's forward for one shape; the module gets its own back."""
    forward = module.forward
    graphed = torch.cuda.make_graphed_callables(lambda codes: forward(codes), (codes,))
    return lambda codes: graphed(codes).clone()


def plain_graph(module: torch.nn.Module, codes: Tensor) -> Call:
    """`torch.cuda.graph` by hand."""
    static, graph = codes.clone(), torch.cuda.CUDAGraph()
    module(static)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = module(static)

    def call(codes: Tensor) -> Tensor:
        static.copy_(codes)
        graph.replay()
        return output.clone()

    return call


def omnigraph(module: torch.nn.Module, codes: Tensor, compiled: bool = False) -> Call:
    shape = (codes.shape[0], codes.shape[-1])
    plan = og.BucketPlan((), compiled=(shape,)) if compiled else og.BucketPlan((shape,))
    decoder = og.GraphedDecoder(module, plan)
    decoder.warmup(strict=True)
    return decoder.decode


WAYS: dict[str, Callable[[torch.nn.Module, Tensor], Call]] = {
    "eager": eager,
    "torch.cuda.make_graphed_callables": graphed_callables,
    "torch.cuda.graph": plain_graph,
    "omnigraph": omnigraph,
}
COMPILED_WAYS: dict[str, Callable[[torch.nn.Module, Tensor], Call]] = {
    "torch.compile, reduce-overhead": reduce_overhead,
    "omnigraph, compiled": lambda module, codes: omnigraph(module, codes, compiled=True),
}


@torch.no_grad()
def calls(module: torch.nn.Module, shape: tuple[int, int], repeats: int) -> list[dict[str, Any]]:
    """Every way at one shape: seconds to its first result, milliseconds of a call, and its distance from eager's result."""
    codes = torch.randint(module.config.codebook_size, (shape[0], module.config.num_quantizers, shape[1]), device="cuda")
    ways = WAYS | (COMPILED_WAYS if shape in COMPILED else {})
    made, rows = {}, []
    for name, make in ways.items():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        start = time.perf_counter()
        made[name] = make(module, codes)
        result = made[name](codes)
        torch.cuda.synchronize()
        rows.append({"shape": shape, "way": name, "start_s": time.perf_counter() - start, "bitwise": torch.equal(result, module(codes))})
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, call in made.items():
            times[name].append(timed(lambda call=call: call(codes)))
    return [row | {"ms": spread(times[row["way"]][2:])} for row in rows]


@torch.no_grad()
def long_decode(module: torch.nn.Module, repeats: int) -> dict[str, Any]:
    """The module's own loop over chunks beside the decoder's, which loses no samples at the joints."""
    codes = torch.randint(module.config.codebook_size, (1, module.config.num_quantizers, LONG), device="cuda")
    with og.GraphedDecoder(module, og.BucketPlan.grid([1, 8], [300, 325])) as decoder:
        decoder.warmup(strict=True)
        ways = {
            "transformers chunked_decode": lambda: module.chunked_decode(codes, chunk_size=300, left_context_size=25),
            "omnigraph": lambda: decoder.chunked_decode(codes, chunk_size=300, left_context_size=25),
        }
        samples = {name: way().shape[-1] for name, way in ways.items()}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                times[name].append(timed(way))
        full = decoder.facts.samples(LONG)
    return {"frames": LONG, "full": full, "rows": [{"way": n, "samples": samples[n], "ms": spread(t[1:])} for n, t in times.items()]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16"])
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    found: dict[str, Any] = {"schema": "omnigraph.bench.beside/1", "results": []}
    for name in args.dtype:
        module = og.models.code2wav("default", dtype=getattr(torch, name), device="cuda")
        result: dict[str, Any] = {"provenance": provenance(module, method=METHOD), "calls": []}
        result["long"] = long_decode(module, max(args.repeats // 6, 5))
        print(json.dumps(result["long"]))
        for shape in SHAPES:
            rows = calls(module, shape, args.repeats)
            for row in rows:
                print(f"{shape} {row['way']:34} {row['ms']['median']:8.3f} ms, from {row['start_s']:.2f} s on, bitwise {row['bitwise']}")
            result["calls"] += rows
        found["results"].append(result)
        args.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
