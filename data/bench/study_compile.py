"""What compiling Code2Wav costs, and whether one compilation can serve all lengths.

    python data/bench/study_compile.py OUT.json [--size small --device cpu --lengths 12 17 30] [--variants static ...] [--limit 240]

Every variant runs in a process of its own, with an empty Inductor cache of its own, and is stopped at the limit; what it had found
until then is kept. `static` is run twice on one cache: what the second process compiles is nothing, if the cache works. Each variant
says the seconds until each length first had a result, how many graphs were compiled for them and why again, where the time went, what
a replay takes, and its error beside eager's. `integer` variants replace, in this process alone, transformers' padding
arithmetic (`math.ceil` of a true division, which is 0 at stride 1) by what it comes to.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_timing import in_turn, sync
from torch import Tensor, nn

import omnigraph as og
from omnigraph._files import read_json, write_json
from omnigraph._pool import Pool
from omnigraph._provenance import provenance
from omnigraph._warmup import RECOMPILE_LIMIT, compile_module
from omnigraph.compare import Reference, relative_error, within_rule

SCHEMA = "omnigraph.bench.compile/1"
METHOD = "a process and an empty Inductor cache for each variant; seconds by the clock from the call to its first result; random codes"
OPTIONS = {"triton.cudagraphs": False}
Call = Callable[[Tensor], Tensor]


def whole(module: nn.Module, dynamic: bool | None) -> Call:
    return torch.compile(module, dynamic=dynamic, options=OPTIONS)


def apart(module: nn.Module, dynamic: bool | None) -> Call:
    """The transformer and the stack of convolutions, compiled each for itself."""
    compiled = torch.compile(module.pre_transformer, dynamic=dynamic, options=OPTIONS)

    def convolve(hidden: Tensor) -> Tensor:
        for block in [*(block for blocks in module.upsample for block in blocks), *module.decoder]:
            hidden = block(hidden)
        return hidden.clamp(min=-1, max=1)

    convolutions = torch.compile(convolve, dynamic=dynamic, options=OPTIONS)

    def call(codes: Tensor) -> Tensor:
        hidden = module.code_embedding(codes + module.code_offset).mean(1)
        return convolutions(compiled(inputs_embeds=hidden).last_hidden_state.permute(0, 2, 1))

    return call


def regional(module: nn.Module, dynamic: bool | None) -> Call:
    """Each repeated block compiled by itself: the layers of the transformer share one compilation, the others come in few forms."""
    for part in [*module.pre_transformer.layers, *(blocks[1] for blocks in module.upsample), *module.decoder[1:-2]]:
        part.compile(dynamic=dynamic, options=OPTIONS)
    return module


def traced(module: nn.Module, dynamic: bool | None) -> Call:
    """Dynamo alone, nothing is compiled: how large the output's length has become as an expression of the input's."""

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        [output] = graph.graph.find_nodes(op="output")
        length = output.args[0][0].meta["example_value"].shape[-1]
        text = str(length.node.expr if isinstance(length, torch.SymInt) else length)
        TOLD.setdefault("expressions", []).append({"characters": len(text), "ceilings": text.count("Ceil"), "starts": text[:60]})
        return graph.forward

    return torch.compile(module, dynamic=dynamic, backend=backend)


TOLD: dict[str, Any] = {}
# how it is compiled, dynamic=, whether only the length is marked dynamic, whether the padding is integer arithmetic
VARIANTS: dict[str, tuple[Callable[[nn.Module, bool | None], Call], bool | None, bool, bool]] = {
    "static": (lambda module, _: compile_module(module), False, False, False),
    "static again": (lambda module, _: compile_module(module), False, False, False),
    "regional static": (regional, False, False, False),
    "regional dynamic, integer": (regional, True, False, True),
    "apart dynamic, integer": (apart, True, False, True),
    "length, integer": (whole, None, True, True),
    "dynamic, integer": (whole, True, False, True),
    "trace dynamic": (traced, True, False, False),
    "trace dynamic, integer": (traced, True, False, True),
    "regional dynamic": (regional, True, False, False),
    "apart dynamic": (apart, True, False, False),
    "length": (whole, None, True, False),
    "dynamic": (whole, True, False, False),
}
CACHED = {"static again": "static"}  # whose cache it takes


def extra_padding(conv: Any, hidden_state: Tensor) -> int:
    """What `_get_extra_padding_for_conv1d` comes to, in whole numbers: 0 at stride 1, which all of Code2Wav's convolutions have."""
    return (conv.kernel_size - conv.padding - hidden_state.shape[-1]) % conv.stride if conv.stride != 1 else 0


def integer_padding() -> None:
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

    modeling.Qwen3OmniMoeCausalConvNet._get_extra_padding_for_conv1d = extra_padding


class Reasons(logging.Handler):
    """Dynamo's reasons for compiling again."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        torch._logging.set_logs(recompiles=True)
        logging.getLogger("torch._dynamo.guards.__recompiles").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        lines = [line.strip(" -") for line in record.getMessage().splitlines() if line.strip().startswith("-")]
        self.found += [line.partition("#")[0].strip()[:160] for line in lines[:1]]


def counted() -> dict[str, int]:
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    found = {name: int(inductor[name]) for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")}
    return found | {"graphs": int(counters["stats"]["unique_graphs"])}


def where_time_goes(most: int = 12) -> dict[str, float]:
    """Seconds of Dynamo's and Inductor's own phases, the longest first; they nest."""
    names, seconds = torch._dynamo.utils.compile_times(repr="csv", aggregate=True)
    rows = sorted(zip(names, map(float, seconds), strict=True), key=lambda row: -row[1])
    return {name: round(took, 2) for name, took in rows[:most] if took >= 0.1}


@torch.no_grad()
def study(name: str, args: argparse.Namespace) -> None:
    """Run one variant and print what it finds, a JSON object a line, the last the most complete."""
    how, dynamic, marked, integer = VARIANTS[name]
    module = og.models.code2wav(args.size, dtype=getattr(torch, args.dtype), device=args.device)
    reference, reasons = Reference(module), Reasons()
    if integer:
        integer_padding()
    row: dict[str, Any] = {"variant": name, "rows": [], "finished": False, "cache": args.cache}
    wanted = [(1, length) for length in args.lengths]

    def drawn(shape: tuple[int, int]) -> Tensor:
        generator = torch.Generator().manual_seed(shape[1])
        size = (shape[0], module.config.num_quantizers, shape[1])
        codes = torch.randint(module.config.codebook_size, size, generator=generator).to(args.device)
        if marked:
            torch._dynamo.mark_dynamic(codes, 2)
        return codes

    def tell() -> None:
        row.update(counters=counted(), reasons=reasons.found[:8], times=where_time_goes(), **TOLD)
        print("FOUND " + json.dumps(row), flush=True)

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(args.limit)
    try:
        limits: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT, "accumulated_recompile_limit": RECOMPILE_LIMIT}
        with torch._dynamo.config.patch({**limits, "fail_on_recompile_limit_hit": True}):
            eager = {shape: module(drawn(shape)) for shape in wanted}
            exact = {shape: reference(drawn(shape)) for shape in wanted}
            ways = {shape: partial(module, drawn(shape)) for shape in wanted}
            timed = in_turn(ways, torch.device(args.device), args.repeats)
            call, pool = how(module, dynamic), Pool(args.device)
            for shape in wanted:
                before, start, codes = counted()["graphs"], time.perf_counter(), drawn(shape)
                results: list[Tensor] = []
                pool.warm(lambda codes, into=results: into.append(call(codes)), codes)  # in the state that the capture will find
                sync(codes.device)
                took, result = time.perf_counter() - start, results[0]
                errors = relative_error(result, exact[shape]), relative_error(eager[shape], exact[shape])
                found = {"shape": shape, "seconds": took, "graphs": counted()["graphs"] - before, "error": errors[0]}
                found |= {"eager_error": errors[1], "ok": within_rule(*errors, result.dtype)}
                row["rows"].append(found)
                tell()
            row["one_serves_all"] = all(found["graphs"] == 0 for found in row["rows"][2:]) and dynamic is not False
            for found in row["rows"] if not name.startswith("trace") else ():
                codes = drawn(found["shape"])
                graph = og.capture(call, codes, pool=pool, warmup=0, compiled=True)
                found |= in_turn({"replay_ms": lambda g=graph, c=codes: g.replay(c)}, codes.device, args.repeats)
                found["eager_ms"] = timed[found["shape"]]
                graph.close()
            row["finished"] = True
    except KeyboardInterrupt:
        row["stopped_after_s"] = args.limit
    except Exception as error:  # a variant that cannot be compiled is a result too
        row["error"] = f"{type(error).__name__}: {str(error)[:400]}"
    signal.alarm(0)
    tell()


def in_process(name: str, args: argparse.Namespace, cache: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "-", "--one", name, "--cache", cache, "--limit", str(args.limit), "--repeats", str(args.repeats)]
    command += ["--size", args.size, "--device", args.device, "--dtype", args.dtype, "--lengths", *map(str, args.lengths)]
    start, found = time.perf_counter(), {"variant": name, "rows": [], "finished": False}
    try:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit + 90, env=environment)
        output, problem = done.stdout, done.stderr
    except subprocess.TimeoutExpired as expired:
        output, problem = (expired.stdout or b"").decode(), "killed"
    lines = [line for line in output.splitlines() if line.startswith("FOUND ")]
    if lines:
        found = json.loads(lines[-1].removeprefix("FOUND "))
    elif problem:
        found["error"] = problem.strip().splitlines()[-1][:400]
    found.pop("cache", None)
    return found | {"process_s": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[25, 97, 50, 325])
    parser.add_argument("--limit", type=int, default=240, help="seconds for each variant")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--one", choices=VARIANTS, help="run one variant here and print what it finds")
    parser.add_argument("--cache", default="")
    args = parser.parse_args()
    if args.one:
        study(args.one, args)
        return
    about = provenance(og.models.code2wav(args.size, dtype=getattr(torch, args.dtype), device=args.device), method=METHOD)
    known = read_json(args.out, SCHEMA)["variants"] if args.out.exists() else []
    variants = {row["variant"]: row for row in known}
    with tempfile.TemporaryDirectory() as caches:
        for name in args.variants:
            cache = Path(caches) / CACHED.get(name, name).replace(" ", "-").replace(",", "")
            variants[name] = row = in_process(name, args, str(cache))
            write_json(args.out, SCHEMA, {"provenance": about, "lengths": args.lengths, "variants": list(variants.values())})
            seconds = [round(found["seconds"], 1) for found in row["rows"]]
            graphs, replays = ([found.get(key) for found in row["rows"]] for key in ("graphs", "replay_ms"))
            medians = [replay and round(replay["median"], 3) for replay in replays]
            print(f"{name}: {seconds} s, {graphs} graphs, {medians} ms, {row.get('error') or row.get('stopped_after_s') or ''}", flush=True)


if __name__ == "__main__":
    main()
