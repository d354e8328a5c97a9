"""Drive a decoder with the calls of a trace: what each shape takes through it and eagerly, and whether graphs pay."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import torch

from omnigraph._needs import need
from omnigraph._provenance import device_name
from omnigraph._warmup import CaptureReport, Progress
from omnigraph.decoder import GraphedDecoder
from omnigraph.shapes import Calls, Shape
from omnigraph.stats import Outcome

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Timing:
    """Times of one shape in milliseconds, the decoder's and eager's, and how the decoder served it."""

    shape: Shape
    outcome: Outcome
    calls: int
    decode_ms: tuple[float, ...]
    eager_ms: tuple[float, ...]


@dataclass(frozen=True)
class Driven:
    """What `drive` measured: a row for each shape, on `device` in `dtype`, under `backend`."""

    rows: tuple[Timing, ...]
    device: str
    dtype: str
    backend: str

    @property
    def calls(self) -> int:
        return sum(row.calls for row in self.rows)

    @property
    def eager_seconds(self) -> float:
        """What the calls take eagerly: the median of each shape times its calls."""
        return sum(row.calls * median(row.eager_ms) for row in self.rows) / 1e3

    @property
    def decode_seconds(self) -> float:
        """What the calls take through the decoder, likewise."""
        return sum(row.calls * median(row.decode_ms) for row in self.rows) / 1e3

    @property
    def speedup(self) -> float:
        return self.eager_seconds / self.decode_seconds

    def payback(self, report: CaptureReport) -> float:
        """Calls after which the warm-up has paid back its seconds; infinite where it never does."""
        saved = (self.eager_seconds - self.decode_seconds) / self.calls
        return math.ceil((report.seconds + report.probe_seconds) / saved) if saved > 0 else math.inf

    def verdict(self, report: CaptureReport) -> str:
        """Do graphs pay for this decoder here, and after how many calls?"""
        each, calls = 1e3 / self.calls, self.payback(report)
        measured = (
            f"{self.decode_seconds * each:.2f} ms a call through the decoder, {self.eager_seconds * each:.2f} ms eager "
            f"({self.speedup:.2f} times), on {self.device} in {self.dtype}, backend={self.backend!r}"
        )
        if math.isinf(calls):
            return f"Graphs do not pay for this decoder here: {measured}."
        if self.speedup < 1.05:
            return f"Graphs hardly pay for this decoder here: {measured}; the warm-up is paid back after {calls:,} calls."
        return f"Graphs pay for this decoder here: {measured}; the warm-up is paid back after {calls:,} calls."

    def to_frame(self) -> pd.DataFrame:
        """Columns: shape, batch, frames, calls, kind, bucket, and median and quartiles of eager_ms and decode_ms."""
        rows = []
        for row in self.rows:
            found: dict[str, Any] = {
                "shape": str(row.shape),
                "batch": row.shape.batch,
                "frames": row.shape.frames,
                "calls": row.calls,
                "kind": row.outcome.kind,
                "bucket": " + ".join(map(str, row.outcome.buckets)) or str(row.outcome.reason),
            }
            for name, times in (("eager_ms", row.eager_ms), ("decode_ms", row.decode_ms)):
                low, middle, high = quantiles(times, n=4) if len(times) > 1 else times * 3
                found |= {name: middle, f"{name}_q1": low, f"{name}_q3": high}
            rows.append(found)
        frame: pd.DataFrame = need("pandas").DataFrame(rows)
        return frame


def sample(calls: Calls, limit: int, seed: int = 0) -> list[Shape]:
    """At most `limit` calls drawn without replacement, so that each shape keeps its share; in random order.

    >>> len(sample({Shape(1, 25): 30, Shape(1, 50): 10}, limit=4))
    4
    """
    chance = random.Random(seed)
    shapes = sorted(calls)
    return chance.sample(shapes, k=min(limit, sum(calls.values())), counts=[calls[s] for s in shapes])


@torch.no_grad()
def drive(
    decoder: GraphedDecoder, calls: Calls, *, limit: int = 500, eager_repeats: int = 5, seed: int = 0, progress: bool | Progress = True
) -> Driven:
    """Decode up to `limit` of `calls` on random codes, timing each, and the first `eager_repeats` of each shape eagerly beside.

    Times are wall-clock milliseconds of single calls, synchronised. The calls count in `decoder.stats`.

    Args:
        calls: how often each shape is called, as `trace.calls(...)` gives it.
        progress: show a bar; or a function, as of `GraphedDecoder.warmup`, that is called before each call and may raise to stop.
    """
    order = sample(calls, limit, seed)
    if not order:
        raise ValueError("there are no calls to decode: the trace is empty")
    times: dict[Shape, list[float]] = {shape: [] for shape in sorted(set(order))}
    eager: dict[Shape, list[float]] = {shape: [] for shape in times}
    outcomes: dict[Shape, Outcome] = {}
    bar: Callable[..., Iterable[Shape]] = need("tqdm.auto").tqdm if progress is True else lambda shapes, **_: shapes
    for done, shape in enumerate(bar(order, desc="decoding", unit="call")):
        if callable(progress):
            progress(f"decode {shape}", done, len(order))
        codes = decoder._codes(shape)
        if shape not in outcomes:
            outcomes[shape] = decoder.served(shape)
            decoder.module(codes)  # the first call of a shape picks kernels
        times[shape].append(_time(decoder.decode, codes))
        if len(eager[shape]) < eager_repeats:
            eager[shape].append(_time(decoder.module, codes))
    rows = tuple(Timing(s, outcomes[s], len(times[s]), tuple(times[s]), tuple(eager[s])) for s in times)
    first = next(decoder.module.parameters(), None)
    dtype = "none" if first is None else str(first.dtype).removeprefix("torch.")
    backend = decoder._live.pool.backend if decoder._live is not None else "eager"
    return Driven(rows, device_name(decoder.device), dtype, backend)


def _time(decode: Callable[[torch.Tensor], torch.Tensor], codes: torch.Tensor) -> float:
    """Wall-clock milliseconds of one call, until its result is there."""
    cuda = codes.device.type == "cuda"
    if cuda:
        torch.cuda.current_stream(codes.device).synchronize()
    start = time.perf_counter()
    decode(codes)
    if cuda:
        torch.cuda.current_stream(codes.device).synchronize()
    return (time.perf_counter() - start) * 1e3
