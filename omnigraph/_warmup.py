"""Capturing the buckets of a plan, the largest first, into one pool, with one garbage collection and one flush for all."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import is_
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

import torch

from omnigraph._fingerprint import plain_tensors
from omnigraph._html import table
from omnigraph._needs import need
from omnigraph._pool import Pool
from omnigraph.facts import DecoderFacts
from omnigraph.graph import CapturedGraph, CaptureError, capture, flush
from omnigraph.shapes import Bucket, Shape

if TYPE_CHECKING:
    import pandas as pd

RECOMPILE_LIMIT = 1024  # shapes compiled of one module; torch's own limit of 8 would turn the ninth into eager
Progress = Callable[[str, int, int], None]  # what is being done, how many are done, of how many


@dataclass(frozen=True)
class BucketReport:
    """What became of one bucket of the plan: `captured` as itself, as its plain form, or not at all (then `error` says why)."""

    bucket: Bucket
    captured: Bucket | None = None
    error: str = ""
    seconds: float = 0.0
    compile_seconds: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True)
class CaptureReport:
    """What a warm-up captured, what it did not and why, and what it took. Seconds are wall-clock; `nbytes` is the pool's."""

    rows: tuple[BucketReport, ...]
    backend: str
    seconds: float = 0.0
    probe_seconds: float = 0.0
    nbytes: int = 0
    freed: int = 0
    note: str = ""

    @property
    def captured(self) -> tuple[Bucket, ...]:
        return tuple(row.captured for row in self.rows if row.captured is not None)

    @property
    def failed(self) -> tuple[BucketReport, ...]:
        """The buckets that were not captured as asked, those that fell back to plain among them."""
        return tuple(row for row in self.rows if row.error)

    @property
    def compile_seconds(self) -> float:
        return sum(row.compile_seconds for row in self.rows)

    def to_frame(self) -> pd.DataFrame:
        """One row a bucket: bucket, batch, frames, compiled, captured, seconds, compile_seconds, mib, error."""
        rows = [
            {
                "bucket": str(row.bucket),
                "batch": row.bucket.shape.batch,
                "frames": row.bucket.shape.frames,
                "compiled": row.bucket.compiled,
                "captured": str(row.captured or ""),
                "seconds": row.seconds,
                "compile_seconds": row.compile_seconds,
                "mib": row.nbytes / 2**20,
                "error": row.error,
            }
            for row in self.rows
        ]
        frame: pd.DataFrame = need("pandas").DataFrame(rows)
        return frame

    def __str__(self) -> str:
        lines = [
            f"{len(self.captured)} of {len(self.rows)} buckets captured on {self.backend} in {self.seconds:.2f} s "
            f"(probe {self.probe_seconds:.2f} s, compile {self.compile_seconds:.2f} s), pool {self.nbytes / 2**20:.1f} MiB"
        ]
        lines += [f"  {row.bucket}: {'captured as ' + str(row.captured) if row.captured else 'eager'}: {row.error}" for row in self.failed]
        return "\n".join(lines + ([self.note] if self.note else []))

    def _repr_html_(self) -> str:
        heads = ["bucket", "captured as", "seconds", "compile seconds", "MiB", "error"]
        failed_first = sorted(self.rows, key=lambda row: not row.error)
        rows = [[r.bucket, r.captured or "no graph", r.seconds, r.compile_seconds, r.nbytes / 2**20, r.error] for r in failed_first]
        return table(str(self).partition("\n")[0], heads, rows, [self.note])


def compile_module(module: torch.nn.Module) -> Callable[..., Any]:
    """`torch.compile` for static shapes, Inductor's own CUDA graphs off: ours would record theirs."""
    return torch.compile(module, dynamic=False, options={"triton.cudagraphs": False})


def check_output(audio: object, shape: Shape, facts: DecoderFacts | None) -> torch.Tensor:
    """A decoder's output for a call of `shape`, or an error with the numbers.

    Raises:
        ValueError: it is not a tensor `[batch, channels, samples]` with the call's batch and the samples that `facts` promise.
    """
    if not isinstance(audio, torch.Tensor) or audio.dim() != 3:
        got = f"a {tuple(audio.shape)} tensor" if isinstance(audio, torch.Tensor) else type(audio).__name__
        raise ValueError(f"the decoder must return audio [batch, channels, samples] for codes of {shape}; it returned {got}")
    if audio.shape[0] != shape.batch:
        raise ValueError(f"the decoder returned batch size {audio.shape[0]} for codes of batch size {shape.batch}")
    if facts is not None and audio.shape[-1] != facts.samples(shape.frames):
        raise ValueError(
            f"the decoder returned {audio.shape[-1]} samples for {shape.frames} frames; "
            f"{shape.frames} * {facts.upsample} - {facts.trim} = {facts.samples(shape.frames)} were expected"
        )
    return audio


def capture_buckets(
    module: torch.nn.Module,
    buckets: Sequence[Bucket],
    *,
    codes: Callable[[Shape], torch.Tensor],
    facts: DecoderFacts,
    pool: Pool,
    compiled: Callable[..., Any],
    progress: Progress | None = None,
) -> tuple[dict[Bucket, CapturedGraph], list[BucketReport]]:
    """Capture `buckets` of `module` into `pool`; a compiled one that fails becomes its plain form, a plain one that fails is left out."""
    capturing = _Capturing(module, compiled, facts, pool)
    graphs: dict[Bucket, CapturedGraph] = {}
    rows = []
    examples: dict[Shape, torch.Tensor] = {}
    for bucket in buckets:  # first: a copy to the device waits for what runs there
        with suppress(Exception):  # met again below, where it is that bucket's error alone
            examples[bucket.shape] = codes(bucket.shape)
    try:
        for done, bucket in enumerate(buckets):
            if progress is not None:
                progress(f"{'compile' if bucket.compiled else 'capture'} {bucket.shape}", done, len(buckets))
            row, plain = BucketReport(bucket), Bucket(bucket.shape)
            for attempt in (bucket, plain) if bucket.compiled and plain not in buckets else (bucket,):
                start = time.perf_counter()
                try:
                    example = examples[bucket.shape] if bucket.shape in examples else codes(bucket.shape)
                    graphs[attempt] = capturing.capture(attempt, example)
                except Exception as failure:
                    text = str(failure) if isinstance(failure, CaptureError) else f"{type(failure).__name__}: {failure}"
                    row = replace(row, error=f"{row.error}; plain: {text}" if row.error else text)
                    continue
                took, nbytes = time.perf_counter() - start, graphs[attempt].nbytes
                times = (0.0, took) if attempt.compiled else (took, 0.0)
                row = replace(row, captured=attempt, nbytes=nbytes, seconds=times[0], compile_seconds=times[1])
                break
            rows.append(row)
    except BaseException as error:
        for graph in graphs.values():  # whoever keeps the error keeps this frame
            graph.close()
        clear_frames(error.__traceback__)  # and those of a capture that was not done
        raise
    flush(pool.device)
    if progress is not None:
        progress("done", len(buckets), len(buckets))
    return graphs, rows


class _Capturing:
    """Captures buckets, warming up as few as is safe.

    The first plain bucket, the largest, is called once before its capture. The others are captured at once, which halves the start-up
    of a large model. That is right for a module whose calls leave nothing behind. Where a capture fails, or leaves something (a cache by
    shape that it filled, in memory that the pool's graphs will overwrite), it is thrown away, the shape is called and captured again, and
    every later one is called first. What is left is seen in the module's attributes, and out of their sight as bytes that stay allocated.
    """

    def __init__(self, module: torch.nn.Module, compiled: Callable[..., Any], facts: DecoderFacts, pool: Pool) -> None:
        self.module, self.compiled, self.facts, self.pool = module, compiled, facts, pool
        self.call_first = True

    def capture(self, bucket: Bucket, codes: torch.Tensor) -> CapturedGraph:
        if bucket.compiled:
            self._compile(codes)
        elif self.call_first:
            self._call(bucket, codes)
        else:
            try:
                before = plain_tensors(self.module)
                graph = self._capture(bucket, codes)
                if not graph.retained and len(before) == len(graph.keeps) and all(map(is_, before, graph.keeps)):
                    return graph
                graph.close()
            except (CaptureError, ValueError):
                pass  # shown by the second try, if it was not for want of a call
            self.call_first = True
            self._call(bucket, codes)
            return self._capture(bucket, codes)
        graph = self._capture(bucket, codes)
        self.call_first = self.call_first and bucket.compiled
        return graph

    def _capture(self, bucket: Bucket, codes: torch.Tensor) -> CapturedGraph:
        fn = self.compiled if bucket.compiled else self.module
        graph = capture(fn, codes, pool=self.pool, warmup=0, compiled=bucket.compiled)
        check_output(graph.outputs, bucket.shape, self.facts)
        graph.keeps = plain_tensors(self.module)
        return graph

    def _call(self, bucket: Bucket, codes: torch.Tensor) -> None:
        """Most of what would break a capture breaks here, harmlessly."""
        self.pool.warm(lambda codes: check_output(self.module(codes), bucket.shape, self.facts), codes)
        if self.pool.backend == "cuda":
            gc.collect()  # while the device is busy; nothing is collected during a capture

    def _compile(self, codes: torch.Tensor) -> None:
        limits: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT, "accumulated_recompile_limit": RECOMPILE_LIMIT}
        with torch._dynamo.config.patch({**limits, "fail_on_recompile_limit_hit": True, "suppress_errors": False}):
            self.pool.warm(self.compiled, codes, times=3)
