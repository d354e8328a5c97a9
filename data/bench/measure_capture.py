"""Measure capture and replay of Code2Wav on a GPU: start-up against a plain loop, host time of a call, latencies, correctness.

    python data/bench/measure_capture.py OUT.json [--size small]

Both sides of each ratio are measured in this one process. Times are medians; spreads are quartiles. A start-up that includes the loading
of kernels can be measured once a process: both ways, in processes of their own, the loop first.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_timing import in_turn, spread, sync

import omnigraph as og
from omnigraph._provenance import provenance
from omnigraph.compare import Reference

LENGTHS = [2, 4, 8, 16, 25, 32, 50, 64, 128, 256, 325]
SHAPES = [(b, f) for b in (1, 4, 8) for f in LENGTHS]
PADDED = [(1, 41), (1, 33), (1, 20), (1, 3), (3, 50), (2, 41), (5, 25), (1, 300), (7, 20), (1, 97)]
METHOD = "one process; medians of repeated calls after warm-up, random codes; CUDA events for device times, perf_counter for host times"


def flush() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def smallest_first(module: torch.nn.Module, codes: Callable[..., torch.Tensor]) -> tuple[float, int, list[Any]]:
    """The plain loop: each shape warmed up, synchronised and captured by `torch.cuda.graph`, the smallest first, in one pool."""
    flush()
    before, start, graphs = torch.cuda.memory_reserved(), time.perf_counter(), []
    pool = torch.cuda.graph_pool_handle()
    with torch.no_grad():
        for shape in sorted(SHAPES, key=lambda s: s[0] * s[1]):
            static = codes(og.Shape(*shape))
            module(static)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = module(static)
            graphs.append((shape, graph, static, output))
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.memory_reserved() - before, graphs


def library(module: torch.nn.Module) -> tuple[float, int, og.GraphedDecoder, og.CaptureReport]:
    flush()
    before = torch.cuda.memory_reserved()
    decoder = og.GraphedDecoder(module, og.BucketPlan(tuple(SHAPES)))
    report = decoder.warmup(strict=True)
    torch.cuda.synchronize()
    return report.seconds, torch.cuda.memory_reserved() - before, decoder, report


def startup(module: torch.nn.Module) -> tuple[dict[str, Any], og.GraphedDecoder, og.CaptureReport]:
    """Both ways three times in turn; the first round, which loads kernels, is left out."""
    probe = og.GraphedDecoder(module, og.BucketPlan(((1, 2),)))
    with torch.no_grad():
        for shape in SHAPES:
            module(probe._codes(og.Shape(*shape)))
    rounds: list[dict[str, float]] = []
    decoder, report = None, None
    for _ in range(3):
        loop_seconds, loop_bytes, graphs = smallest_first(module, probe._codes)
        for _, graph, _, _ in graphs:
            graph.reset()
        del graphs, graph
        if decoder is not None:
            decoder.close()
        flush()
        seconds, nbytes, decoder, report = library(module)
        rounds.append({"loop_s": loop_seconds, "loop_bytes": loop_bytes, "omnigraph_s": seconds, "omnigraph_bytes": nbytes})
        decoder.close()
        flush()
    seconds, nbytes, decoder, report = library(module)
    later = rounds[1:]
    found = {
        "shapes": SHAPES,
        "rounds": rounds,
        "time_ratio": median(r["omnigraph_s"] / r["loop_s"] for r in later),
        "memory_ratio": median(r["omnigraph_bytes"] / r["loop_bytes"] for r in later),
        "probe_s": report.probe_seconds,
        "pool_bytes": report.nbytes,
    }
    return found, decoder, report


def cold(size: str, dtype: str, way: str) -> float:
    """Seconds of a start-up in a process that has run nothing of the module but its construction (and, here, the probe)."""
    command = [sys.executable, __file__, "-", "--size", size, "--cold", way, "--dtype", dtype]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def cold_seconds(size: str, dtype: torch.dtype, way: str) -> float:
    module = og.models.code2wav(size, dtype=dtype, device="cuda")
    if way == "omnigraph":
        return library(module)[0]
    return smallest_first(module, og.GraphedDecoder(module, og.BucketPlan(((1, 2),)))._codes)[0]


def compiled(module: torch.nn.Module) -> list[dict[str, Any]]:
    """A compiled bucket beside the plain one: error, seconds to compile and milliseconds of a call."""
    rows = []
    for plan in (og.BucketPlan(((1, 50),)), og.BucketPlan(((1, 50),), compiled=((1, 50),))):
        with og.GraphedDecoder(module, plan) as decoder:
            report = decoder.warmup(strict=True)
            taken = latencies(module, decoder, 40, [(1, 50)])[0]
            row = verified(og.verify(decoder, [(1, 50)], reference=Reference(module)))[0]
            times = {name: taken[name] for name in ("eager_ms", "decode_ms")}
            rows.append({**row, **times, "compile_seconds": report.compile_seconds})
    return rows


def host_times(
    decoder: og.GraphedDecoder, repeats: int = 200, shapes: Sequence[Sequence[int]] = ((1, 4), (1, 25), (1, 50))
) -> list[dict[str, Any]]:
    """Microseconds of host time of a call, until it returns: the three ways in turn, each on an idle device, then ten in a row."""
    rows = []
    for shape in shapes:
        codes = decoder._codes(og.Shape(*shape))
        graph = decoder._live.graphs[og.Bucket(og.Shape(*shape))]
        static, output = graph.inputs[0], graph.outputs
        launch = graph._launcher.graph.replay if graph.backend == "cuda" else graph.launch

        def bare(static=static, output=output, launch=launch, codes=codes) -> torch.Tensor:
            static.copy_(codes)
            launch()
            return output.clone()

        times: dict[str, list[float]] = {"bare": [], "decode": [], "decode_checked": []}
        in_a_row: dict[str, list[float]] = {name: [] for name in times}
        for _ in range(repeats):
            for name in times:
                decoder.check_stale = name == "decode_checked"
                call = bare if name == "bare" else lambda codes=codes: decoder.decode(codes)
                for taken, n in ((times[name], 1), (in_a_row[name], 10)):
                    sync(decoder.device)
                    start = time.perf_counter()
                    for _ in range(n):
                        call()
                    taken.append((time.perf_counter() - start) * 1e6 / n)
        decoder.check_stale = True
        rows.append({"shape": shape, **_medians(times, repeats), "in_a_row": _medians(in_a_row, repeats)})
    return rows


def _medians(times: dict[str, list[float]], repeats: int) -> dict[str, dict[str, float]]:
    return {f"{name}_us": spread(taken[repeats // 10 :]) for name, taken in times.items()}


@torch.no_grad()
def latencies(
    module: torch.nn.Module, decoder: og.GraphedDecoder, repeats: int, shapes: Sequence[Sequence[int]] = SHAPES
) -> list[dict[str, Any]]:
    """Milliseconds of a call from launch to end, eager and by replay in turn, and the bytes of its graph."""
    rows = []
    for shape in map(og.Shape._make, shapes):
        codes = decoder._codes(shape)
        few = max(5, repeats // max(1, shape[0] * shape[1] // 400))
        ways = {"eager_ms": lambda c=codes: module(c), "decode_ms": lambda c=codes: decoder.decode(c)}
        graph = next(graph for bucket, graph in decoder._live.graphs.items() if bucket.shape == shape)
        rows.append({"shape": shape, **in_turn(ways, codes.device, few), "bytes": graph.nbytes, "repeats": few})
    return rows


def report(result: dict[str, Any]) -> None:
    start = result["startup"]
    print(
        result["provenance"]["dtype"], f"start-up: {start['time_ratio']:.3f} of the loop's time, {start['memory_ratio']:.3f} of its memory"
    )
    for one in start["rounds"]:
        print("  ", {name: round(value, 3) for name, value in one.items()})
    for row in result["host"]:
        for way, times in (("one", row), ("in a row", row["in_a_row"])):
            medians = {name: times[f"{name}_us"]["median"] for name in ("bare", "decode", "decode_checked")}
            print("  ", row["shape"], way, *(f"{name} {us:.1f} us ({us / medians['bare']:.2f})" for name, us in medians.items()))
    for row in result.get("compiled", ()):
        print("  ", row["bucket"], row["decode_ms"]["median"], "ms, error", row["error"] / row["eager_error"], "of eager's")
    print("   cold", result.get("cold"))


def verified(comparison: og.Comparison) -> list[dict[str, Any]]:
    return [
        {
            "shape": row.shape,
            "kind": row.outcome.kind,
            "bucket": " + ".join(map(str, row.outcome.buckets)),
            "bitwise": row.bitwise,
            "error": row.error,
            "eager_error": row.eager_error,
            "ok": row.ok,
            "problem": row.problem,
        }
        for row in comparison.rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="default")
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--cold", choices=("loop", "omnigraph"), help="print the seconds of one start-up and end")
    args = parser.parse_args()
    if args.cold:
        print(cold_seconds(args.size, getattr(torch, args.dtype[0]), args.cold))
        return
    found: dict[str, Any] = {"schema": "omnigraph.bench.capture/1", "results": []}
    for name in args.dtype:
        module = og.models.code2wav(args.size, dtype=getattr(torch, name), device="cuda")
        result: dict[str, Any] = {"provenance": provenance(module, method=METHOD)}
        if name == "bfloat16":
            result["cold"] = [{f"{way}_s": cold(args.size, name, way) for way in ("loop", "omnigraph")} for _ in range(2)]
        result["startup"], decoder, _ = startup(module)
        result["host"] = host_times(decoder)
        result["latency"] = latencies(module, decoder, args.repeats)
        comparison = og.verify(decoder, [*SHAPES, *PADDED], reference=Reference(module))
        result["verify"] = verified(comparison)
        print(comparison)
        decoder.close()
        result["compiled"] = compiled(module)
        found["results"].append(result)
        args.out.write_text(json.dumps(found) + "\n")
        report(result)
        del decoder, module
        flush()


if __name__ == "__main__":
    main()
