"""Capturing the buckets of a plan: all warm-up calls, then all captures, the largest first, into one pool; one collection, one flush."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from omnigraph._needs import need
from omnigraph._pool import Pool
from omnigraph.facts import DecoderFacts
from omnigraph.graph import CapturedGraph, capture, flush
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
    steps, done = 2 * len(buckets), 0

    def tell(what: str) -> None:
        nonlocal done
        if progress is not None:
            progress(what, done, steps)
        done += 1

    # The device is not waited for between here and the flush, so that it runs the warm-up calls while the host captures.
    examples = {bucket.shape: codes(bucket.shape) for bucket in buckets}
    rows = []
    for bucket in buckets:
        tell(f"{'compile' if bucket.compiled else 'warm up'} {bucket.shape}")
        rows.append(_warm(module, bucket, examples[bucket.shape], facts, pool, compiled, taken=buckets))
    gc.collect()
    if pool.backend == "cuda" and _tight(pool.device):
        flush(pool.device)
    graphs: dict[Bucket, CapturedGraph] = {}
    finished = []
    for row in rows:
        tell(f"capture {row.bucket}")
        for bucket in _attempts(row.captured, buckets):
            try:
                fn, warm = (compiled, 0) if bucket.compiled else (module, int(bucket != row.captured))
                graph = capture(fn, examples[bucket.shape], pool=pool, warmup=warm, compiled=bucket.compiled)
                check_output(graph.outputs, bucket.shape, facts)
                graphs[bucket] = graph
                row = replace(row, captured=bucket, seconds=row.seconds + graph.seconds, nbytes=graph.nbytes)
                break
            except (RuntimeError, ValueError) as error:
                row = replace(row, captured=None, error=f"{row.error}{'; ' if row.error else ''}{error}")
        finished.append(row)
    flush(pool.device)
    tell("done")
    return graphs, finished


def _tight(device: torch.device) -> bool:
    """Is there less memory free than the warm-up calls left cached? A capture may need as much, and cannot take it from the cache."""
    return torch.cuda.mem_get_info(device)[0] < torch.cuda.memory_reserved(device)


def _attempts(bucket: Bucket | None, taken: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """What to capture for a bucket, in order: itself, and its plain form where it is compiled and that is not in the plan anyway."""
    if bucket is None:
        return ()
    plain = Bucket(bucket.shape)
    return (bucket, plain) if bucket.compiled and plain not in taken else (bucket,)


def _warm(
    module: torch.nn.Module,
    wanted: Bucket,
    codes: torch.Tensor,
    facts: DecoderFacts,
    pool: Pool,
    compiled: Callable[..., Any],
    taken: Sequence[Bucket],
) -> BucketReport:
    """Run one bucket's call, compiling it where asked. Most of what would break a capture breaks here, harmlessly."""
    shape, start, error = wanted.shape, time.perf_counter(), ""
    for bucket in _attempts(wanted, taken):
        try:
            if bucket.compiled:
                with torch._dynamo.config.patch(
                    recompile_limit=RECOMPILE_LIMIT,
                    accumulated_recompile_limit=RECOMPILE_LIMIT,
                    fail_on_recompile_limit_hit=True,
                    suppress_errors=False,
                ):
                    pool.warm(compiled, codes, times=3)
            else:
                pool.warm(lambda c: check_output(module(c), shape, facts), codes)
        except Exception as failure:
            error += f"{'; plain: ' if error else ''}{type(failure).__name__}: {failure}"
            continue
        took = time.perf_counter() - start
        compiling = wanted.compiled
        return BucketReport(wanted, bucket, error, seconds=0.0 if compiling else took, compile_seconds=took if compiling else 0.0)
    return BucketReport(wanted, None, error, seconds=time.perf_counter() - start)
