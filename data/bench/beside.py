"""Decoding of Code2Wav beside what one would otherwise use: eager, torch.compile, other graphs. A part of `make bench`.

All ways are measured in one process and on one module, each call of each in turn. Steady state: milliseconds of a call from an idle
device to an idle device. Start-up: seconds from the module to the first result of a way at one shape; the module has run that shape
before, so that no way pays for the loading of kernels, and each compiled way starts with an empty Inductor cache.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from bench_timing import in_turn, wall
from torch import Tensor
from torch._inductor.utils import fresh_cache

import omnigraph as og

SHAPES = [(1, 4), (1, 25), (1, 50), (8, 50)]
COMPILED = [(1, 50)]  # some 20 s to compile, for each of two ways
LONG = 3000  # frames of one long decode in chunks of 300 with 25 frames of left context
Call = Callable[[Tensor], Tensor]


def eager(module: torch.nn.Module, codes: Tensor) -> Call:
    return module


def reduce_overhead(module: torch.nn.Module, codes: Tensor) -> Call:
    """`torch.compile` with its own graphs, its result copied out as a decoder's must be."""
    compiled = torch.compile(module, mode="reduce-overhead", dynamic=False)
    for _ in range(3):
        compiled(codes)
    return lambda codes: compiled(codes).clone()


def graphed_callables(module: torch.nn.Module, codes: Tensor) -> Call:
    """`torch.cuda.make_graphed_callables` of a function that calls the module, for one shape."""
    graphed = torch.cuda.make_graphed_callables(lambda codes: module(codes), (codes,))
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
# The last one made is the last: a reset of Dynamo, before each, makes what is not in a graph compile again.
COMPILED_WAYS: dict[str, Callable[[torch.nn.Module, Tensor], Call]] = {
    "omnigraph, compiled": lambda module, codes: omnigraph(module, codes, compiled=True),
    "torch.compile, reduce-overhead": reduce_overhead,
}


@torch.no_grad()
def calls(module: torch.nn.Module, shape: tuple[int, int], repeats: int, ways: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Every way at one shape: seconds to its first result, milliseconds of a call, and whether its result is eager's, bit for bit."""
    device = next(module.parameters()).device
    codes = torch.randint(module.config.codebook_size, (shape[0], module.config.num_quantizers, shape[1]), device=device)
    all_ways = WAYS | (COMPILED_WAYS if shape in COMPILED else {})
    made: dict[str, Call] = {}
    rows, expected = [], module(codes)
    for name in ways or all_ways:
        cache: AbstractContextManager[Any] = nullcontext()
        if name in COMPILED_WAYS:
            torch._dynamo.reset()
            cache = fresh_cache()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
        with cache:
            start = time.perf_counter()
            made[name] = all_ways[name](module, codes)
            ms, result = wall(device, lambda name=name: made[name](codes))
            start_s = time.perf_counter() - start
        rows.append({"shape": shape, "way": name, "start_s": start_s, "first_ms": ms, "bitwise": torch.equal(result, expected)})
    calls = {name: lambda call=call: call(codes) for name, call in made.items()}
    times = in_turn(calls, device, repeats, timer=lambda call, device: wall(device, call)[0])
    return [row | {"ms": times[row["way"]]} for row in rows]


@torch.no_grad()
def long_decode(module: torch.nn.Module, repeats: int, frames: int = LONG, chunk: int = 300) -> dict[str, Any]:
    """The module's own loop over chunks beside the decoder's, which loses no samples at the joints."""
    device = next(module.parameters()).device
    codes = torch.randint(module.config.codebook_size, (1, module.config.num_quantizers, frames), device=device)
    with og.GraphedDecoder(module, og.BucketPlan.grid([1, 8], [chunk, chunk + 25])) as decoder:
        decoder.warmup(strict=True)
        ways = {
            "transformers chunked_decode": lambda: module.chunked_decode(codes, chunk_size=chunk, left_context_size=25),
            "omnigraph": lambda: decoder.chunked_decode(codes, chunk_size=chunk, left_context_size=25),
        }
        samples = {name: way().shape[-1] for name, way in ways.items()}
        times = in_turn(ways, device, repeats, timer=lambda call, device: wall(device, call)[0])
        full = decoder.facts.samples(frames)
    return {"frames": frames, "full": full, "rows": [{"way": name, "samples": samples[name], "ms": times[name]} for name in ways]}
