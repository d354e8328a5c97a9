"""Measure decode graphs of Qwen-Image-2.1 on a GPU: step times, contention, host time, memory, correctness.

    python data/prefix/measure.py [OUT.json] [--size small] [--no-compile]

Everything that is compared is measured in this one process. Times are medians; spreads are quartiles. `--size small` tries the
script on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import omnigraph as og
from omnigraph._files import write_json
from omnigraph._provenance import provenance
from omnigraph.graph import flush
from omnigraph.models.diffusion import denoising, image_request
from omnigraph.models.qwen_bench import Case, contention_times, spread, step_times
from omnigraph.prefix import DecodeGraphCache

SCHEMA = "omnigraph.bench.prefix/1"
METHOD = "one process; medians of steps after warm-up, random weights and latents; CUDA events for steps, perf_counter for host times"
TARGETS = [64, 144, 256, 576, 1024, 2304, 4096]  # target tokens
COMPILED = [64, 256, 1024, 4096]
PREFIXES = [64, 256, 1024, 4096]
TEXT = 64  # prefix tokens where only the target varies


def shown(what: str, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        found.append(row)
        print(what, {k: round(v["median"], 3) if isinstance(v, dict) else v for k, v in row.items()}, flush=True)
    return found


@torch.no_grad()
def host(model: nn.Module, repeats: int = 200) -> dict[str, Any]:
    """Microseconds of host time until a step returns, the device idle before: through the cache, and the copies and replay alone."""
    cache = DecodeGraphCache(og.models.QwenImageAdapter(model))
    case = Case(model, cache, 64, TEXT)
    case.graph()
    buffers, graph = case.entry().buffers, case.entry().graph

    def bare() -> Tensor:
        buffers.hidden.copy_(case.request.latents)
        buffers.timestep.copy_(case.time)
        graph.launch()
        return graph.outputs.clone()

    taken: dict[str, list[float]] = {"bare": [], "try_decode": [], "fingerprint": []}
    calls = {"bare": bare, "try_decode": case.graph, "fingerprint": cache._fingerprint.changed}
    for _ in range(repeats):
        for name, call in calls.items():
            if case.device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            taken[name].append((time.perf_counter() - start) * 1e6)
    found: dict[str, Any] = {f"{name}_us": spread(times[20:]) for name, times in taken.items()}
    found["beyond_us"] = found["try_decode_us"]["median"] - found["bare_us"]["median"]
    found["layers"] = len(buffers.layers)
    cache.clear()
    return found


def free_bytes(device: torch.device) -> int:
    gc.collect()
    flush(device)
    return int(torch.cuda.mem_get_info()[0]) if device.type == "cuda" else 0


@torch.no_grad()
def memory(model: nn.Module, prefixes: Sequence[int], target: int) -> Iterable[dict[str, Any]]:
    """Bytes of each entry as reported, and as the device has less free. An entry before them pays for what all share."""
    cache = DecodeGraphCache(og.models.QwenImageAdapter(model))
    kept = [Case(model, cache, target, TEXT // 2)]
    kept[0].graph()
    for text in prefixes:
        case = Case(model, cache, target, text, register=False)
        kept.append(case)
        before = free_bytes(case.device)
        cache.register_prefill(case.prefix)
        case.graph()
        yield {"prefix": text, "target": target, "bytes": case.entry().nbytes, "device_bytes": before - free_bytes(case.device)}
    cache.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).parent / "h200.json")
    parser.add_argument("--size", default="default")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    few = args.size == "small"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = og.models.qwen_image(args.size, device=device)
    print(f"model made in {time.perf_counter() - began:.1f} s", flush=True)
    targets, prefixes = (TARGETS[:3], PREFIXES[:2]) if few else (TARGETS, PREFIXES)
    compiled = [] if args.no_compile else COMPILED[:1] if few else COMPILED
    exact = copy.deepcopy(model).to(torch.float64 if few else torch.float32) if compiled else None
    request = image_request(model, (16, 16), text_tokens=TEXT)
    eager, graphs = (list(denoising(model, request, steps=8, guidance=4.0, graphs=way)) for way in (False, True))
    content: dict[str, Any] = {"provenance": provenance(model, method=METHOD)}
    content["bitwise"] = [torch.equal(a, b) for a, b in zip(eager, graphs, strict=True)]
    content["steps"] = shown("step", step_times(model, targets, text=TEXT, compiled=compiled, exact=exact, repeats=args.repeats))
    del exact
    free_bytes(device)
    contended = contention_times(model, targets[:1] if few else [64, 256, 1024], prefixes, repeats=args.repeats)
    content["contention"] = shown("contention", contended)
    [content["host"]] = shown("host", [host(model)])
    content["memory"] = shown("memory", memory(model, prefixes, 64 if few else 256))
    content["seconds"] = time.perf_counter() - began
    print(write_json(args.out, SCHEMA, content), f"{content['seconds']:.0f} s")


if __name__ == "__main__":
    main()
