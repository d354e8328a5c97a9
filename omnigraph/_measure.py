"""Time a module's calls, eager and by replay: the work behind `Profile.measure`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Generator, Sequence
from statistics import quantiles
from typing import Any

import torch

from omnigraph._needs import need
from omnigraph._points import Point
from omnigraph._pool import Pool
from omnigraph._warmup import RECOMPILE_LIMIT, Progress, compile_module
from omnigraph.facts import code_space
from omnigraph.graph import CapturedGraph, capture, flush, settle
from omnigraph.shapes import Bucket, How, Shape

LEAST = 5  # runs of each, however long they take

Failed = tuple[Bucket, str]


def time_once(call: Callable[[torch.Tensor], Any], codes: torch.Tensor) -> float:
    """Milliseconds of one call on an idle device: between CUDA events on a GPU, by the clock on a CPU."""
    if codes.device.type != "cuda":
        began = time.perf_counter()
        call(codes)
        return (time.perf_counter() - began) * 1e3
    event: Any = torch.cuda.Event
    start, end, stream = event(enable_timing=True), event(enable_timing=True), torch.cuda.current_stream(codes.device)
    stream.synchronize()
    start.record(stream)
    call(codes)
    end.record(stream)
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds


def time_calls(
    call: Callable[[torch.Tensor], Any], inputs: Sequence[torch.Tensor], repeats: int, seconds_each: float
) -> tuple[float, float, int]:
    """Median and interquartile range in milliseconds, and how many runs: the device is idle before each of them.

    `call` is run on `inputs` in turn; the first two runs are not counted.
    """
    times: list[float] = []
    wanted = repeats + 2
    while len(times) < wanted:
        times.append(time_once(call, inputs[len(times) % len(inputs)]))
        if len(times) == 2:
            wanted = 2 + max(LEAST, min(repeats, int(seconds_each * 1e3 / times[-1])))
    low, middle, high = quantiles(times[2:], method="inclusive")
    return middle, high - low, len(times) - 2


def measure_points(
    module: torch.nn.Module,
    shapes: Sequence[Shape],
    compiled: Sequence[Shape],
    *,
    skip: Collection[tuple[Shape, How]],
    num_quantizers: int | None,
    codebook_size: int | None,
    repeats: int,
    seconds_each: float,
    seconds: float | None,
    progress: bool | Progress,
    backend: str,
) -> Generator[Point | Failed, None, None]:
    """Yield a `Point` for each shape and way of running it that is not in `skip`, or the graph that could not be made and why.

    The largest shape is captured first, as in a warm-up, so that the bytes the others add are those they add to a warm-up's pool.
    """
    if repeats < LEAST or seconds_each <= 0 or not shapes or any(min(s) < 1 for s in [*shapes, *compiled]):
        raise ValueError(
            f"needs shapes of positive batch and frames, at least {LEAST} repeats and seconds_each above 0; got {len(shapes)} shapes, "
            f"{repeats=}, {seconds_each=}"
        )
    started = time.perf_counter()
    num_quantizers, codebook_size = code_space(module, num_quantizers=num_quantizers, codebook_size=codebook_size)
    module.eval()
    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    pool = Pool(device, backend)
    kept: list[CapturedGraph] = []  # the shared pool's graphs: they live until the end, as in a decoder
    compiled_module = compile_module(module) if compiled else None

    def codes(shape: Shape) -> torch.Tensor:
        return torch.randint(codebook_size, (shape.batch, num_quantizers, shape.frames), device=device)

    def make(shape: Shape, how: How, into: Pool) -> tuple[CapturedGraph, float]:
        """A graph and the seconds that its first run, compilation and capture take."""
        began, call = time.perf_counter(), module if how == "plain" or compiled_module is None else compiled_module
        if how == "compiled":
            limits: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT, "accumulated_recompile_limit": RECOMPILE_LIMIT}
            with torch._dynamo.config.patch({**limits, "fail_on_recompile_limit_hit": True, "suppress_errors": False}):
                into.warm(call, codes(shape), times=3)
        else:
            into.warm(call, codes(shape))
        settle(device)
        return capture(call, codes(shape), pool=into, warmup=0, compiled=how == "compiled"), time.perf_counter() - began

    def graph_point(shape: Shape, how: How) -> Point:
        graph, took = make(shape, how, pool)
        kept.append(graph)
        alone = make(shape, how, Pool(device, backend))[0]
        nbytes = alone.nbytes
        alone.close()
        flush(device)
        timed = time_calls(lambda c: graph.replay(c).clone(), [codes(shape) for _ in range(4)], repeats, seconds_each)
        return Point(shape, how, *timed, bytes_alone=nbytes, bytes_marginal=graph.nbytes, seconds=took)

    def area(shape: Shape) -> int:
        return shape.batch * shape.frames

    ways: list[tuple[Shape, How]] = [(s, how) for s in sorted({*shapes, *compiled}, key=area) for how in ("eager", "plain")]
    ways += [(s, "compiled") for s in sorted(set(compiled), key=area)]
    missing = [way for way in ways if way not in skip]
    if not missing:
        return
    bar = need("tqdm.auto").tqdm(missing, disable=progress is not True, unit="point")
    try:
        with torch.no_grad():
            if any(how != "eager" for _, how in missing):
                bar.set_description(f"{ways[-1][0]} first")
                largest = max((s for s, _ in ways), key=area)
                try:
                    kept.append(make(largest, "plain", pool)[0])
                except Exception:
                    kept.clear()  # met again, and told, when its turn comes
            for done, (shape, how) in enumerate(bar):
                if done and seconds is not None and time.perf_counter() - started > seconds:
                    warnings.warn(f"{seconds:g} s are over: {done} of {len(missing)} points were measured", stacklevel=3)
                    break
                bar.set_description(f"{shape} {how}")
                if callable(progress):
                    progress(f"measure {shape} {how}", done, len(missing))
                try:
                    if how == "eager":
                        yield Point(shape, how, *time_calls(module, [codes(shape) for _ in range(4)], repeats, seconds_each))
                    else:
                        yield graph_point(shape, how)
                except Exception as error:
                    yield Bucket(shape, how == "compiled"), f"{type(error).__name__}: {error}"
    finally:
        bar.close()
        for graph in kept:
            graph.close()
