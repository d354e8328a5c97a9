"""What happened to each call: replayed (exact, padded, split; plain or compiled) or eager, and then why."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from threading import Lock
from typing import TYPE_CHECKING, Literal

from omnigraph._html import table
from omnigraph._needs import need
from omnigraph.shapes import Bucket, Route, Shape
from omnigraph.trace import save_calls

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger("omnigraph")
MAX_TIMES = 4096  # latencies kept for each kind of call: the latest


class Fallback(StrEnum):
    """Why a call went eager."""

    DISABLED = "disabled"
    NOT_WARMED_UP = "not_warmed_up"
    NO_BUCKET = "no_bucket"  # no captured bucket holds the shape
    TOO_MUCH_PADDING = "too_much_padding"
    EAGER_IS_FASTER = "eager_is_faster"  # by the cost function given
    PADDING_UNSAFE = "padding_unsafe"  # a bucket would hold it, but the decoder looks ahead or mixes rows
    UNSAFE_MODULE = "unsafe_module"  # keeps state or draws random numbers: a replay would not do what a call does
    MODULE_CHANGED = "module_changed"  # weights, structure, hooks or train mode are others than at the capture
    ENVIRONMENT_CHANGED = "environment_changed"  # autocast, default dtype or deterministic flags are others than at the capture
    OUTER_CAPTURE = "outer_capture"  # the current stream is being captured by somebody else
    COMPILING = "compiling"  # torch.compile traces through the call
    # Decode graphs with a cached prefix:
    NO_PREFIX = "no_prefix"  # the request has no prefix for this branch
    PADDED_TEXT = "padded_text"  # masked attention branches on what the mask holds
    QUANTIZED_CACHE = "quantized_cache"  # the model keeps its K/V in another dtype than it computes in
    QUANTIZED_PREFIX = "quantized_prefix"  # the prefix comes with scales, or in another dtype than the model's
    NOT_ON_DEVICE = "not_on_device"  # not on CUDA when CUDA was asked for, or not where the model is
    OFFLOAD_HOOKS = "offload_hooks"  # hooks that move weights around
    CACHE_HOOKS = "cache_hooks"  # hooks that skip or reuse what blocks compute
    FORWARD_HOOKS = "forward_hooks"  # other hooks, which a replay would not run
    SEQUENCE_PARALLEL = "sequence_parallel"
    RING_PARALLEL = "ring_parallel"
    TENSOR_PARALLEL = "tensor_parallel"
    SHARDED_PARAMETERS = "sharded_parameters"  # gathered by hooks around each block
    DYNAMIC_WRAPPERS = "dynamic_wrappers"  # LoRA layers and the like, whose arithmetic changes while shapes stay
    UNKNOWN_KEY = "unknown_key"  # never registered, or evicted
    OWNED = "owned"  # by another live request
    ALLOCATION_FAILED = "allocation_failed"
    CAPTURE_FAILED = "capture_failed"
    OVER_BUDGET = "over_budget"  # one entry alone takes more than the bytes allowed


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one call was served. `padding` counts the frames decoded in vain, over all rows."""

    kind: Literal["exact", "padded", "split", "fallback"]
    buckets: tuple[Bucket, ...] = ()
    reason: Fallback | None = None
    padding: int = 0

    def __reduce__(self) -> tuple[type[Outcome], tuple[object, ...]]:
        return Outcome, (self.kind, self.buckets, self.reason, self.padding)  # another process hashes strings differently

    @property
    def compiled(self) -> bool:
        return any(bucket.compiled for bucket in self.buckets)


def outcome(route: Route) -> Outcome:
    """The outcome of a call that takes `route`."""
    if route.kind is None:
        return Outcome("fallback", reason=Fallback(route.miss or Fallback.NO_BUCKET))
    return Outcome(route.kind, tuple(part.bucket for part in route.parts), padding=route.padding)


class Tally:
    """How often a call met an outcome, and the latest times in milliseconds, where they were taken."""

    __slots__ = ("calls", "times")

    def __init__(self) -> None:
        self.calls = 0
        self.times: list[float] = []


class ReplayStats:
    """Counts calls by what was asked for and what served it; always on, and cheap.

    `log_every` writes a line to the logger "omnigraph" each so many calls (0: never).
    """

    def __init__(self, log_every: int = 0) -> None:
        self.log_every = log_every
        self._lock = Lock()
        self._tallies: dict[tuple[Hashable, Outcome], Tally] = {}

    def reset(self) -> None:
        """Forget everything counted so far."""
        with self._lock:
            for tally in self._tallies.values():
                tally.calls, tally.times = 0, []

    def tally(self, call: Hashable, outcome: Outcome) -> Tally:
        """The counter of a call (a `Shape`, or any key) with an outcome, to keep where a look-up each time would cost."""
        with self._lock:
            return self._tallies.setdefault((call, outcome), Tally())

    def record(self, call: Hashable, outcome: Outcome, milliseconds: float | None = None) -> None:
        """Count one call (a `Shape`, or any key) and, where it was timed, how long it took."""
        self.count(self.tally(call, outcome), milliseconds)

    def count(self, tally: Tally, milliseconds: float | None = None) -> None:
        """`record` for who has kept the tally."""
        with self._lock:
            tally.calls += 1
            if milliseconds is not None:
                tally.times.append(milliseconds)
                del tally.times[:-MAX_TIMES]
        if self.log_every and self.calls % self.log_every == 0:
            logger.info("%s", str(self))  # as it is now: handlers may come to it later

    def counts(self) -> dict[tuple[Hashable, Outcome], int]:
        """A snapshot: how often each call met each outcome."""
        with self._lock:
            return {key: tally.calls for key, tally in self._tallies.items() if tally.calls}

    def times(self) -> dict[tuple[Hashable, Outcome], list[float]]:
        """A snapshot of the latencies in milliseconds (empty unless the owner times its calls)."""
        with self._lock:
            return {key: list(tally.times) for key, tally in self._tallies.items() if tally.times}

    @property
    def calls(self) -> int:
        return sum(self.counts().values())

    @property
    def hits(self) -> int:
        return sum(n for (_, outcome), n in self.counts().items() if outcome.kind != "fallback")

    @property
    def hit_rate(self) -> float:
        """Share of calls served by replays, 0 to 1 (0 when there was no call)."""
        return self.hits / max(self.calls, 1)

    @property
    def compiled_hits(self) -> int:
        return sum(n for (_, outcome), n in self.counts().items() if outcome.compiled)

    @property
    def padded_frames(self) -> int:
        """Frames decoded in vain so far."""
        return sum(n * outcome.padding for (_, outcome), n in self.counts().items())

    @property
    def fallbacks(self) -> Counter[Fallback]:
        """Calls that went eager, by reason."""
        found: Counter[Fallback] = Counter()
        for (_, outcome), n in self.counts().items():
            if outcome.reason is not None:
                found[outcome.reason] += n
        return found

    @property
    def kinds(self) -> Counter[str]:
        """Calls by outcome: exact, padded, split, fallback."""
        found: Counter[str] = Counter()
        for (_, outcome), n in self.counts().items():
            found[outcome.kind] += n
        return found

    def to_calls(self) -> dict[Shape, int]:
        """The traffic seen, as a histogram of shapes that `plan_buckets` takes."""
        found: Counter[Shape] = Counter()
        for (call, _), n in self.counts().items():
            if isinstance(call, Shape):
                found[call] += n
        return dict(sorted(found.items()))

    def save_calls(self, path: str | os.PathLike[str]) -> Path:
        """Write `to_calls` as a CSV (batch, frames, count)."""
        return save_calls(path, self.to_calls())

    def to_frame(self) -> pd.DataFrame:
        """One row for each (call, outcome): call, batch, frames, kind, compiled, bucket, reason, calls, padded_frames, median_ms."""
        times, rows = self.times(), []
        for (call, outcome), n in self.counts().items():
            row = {
                "call": str(call),
                "batch": call.batch if isinstance(call, Shape) else None,
                "frames": call.frames if isinstance(call, Shape) else None,
                "kind": outcome.kind,
                "compiled": outcome.compiled,
                "bucket": " + ".join(map(str, outcome.buckets)),
                "reason": str(outcome.reason or ""),
                "calls": n,
                "padded_frames": n * outcome.padding,
                "median_ms": median(times[call, outcome]) if (call, outcome) in times else float("nan"),
            }
            rows.append(row)
        columns = ["call", "batch", "frames", "kind", "compiled", "bucket", "reason", "calls", "padded_frames", "median_ms"]
        frame: pd.DataFrame = need("pandas").DataFrame(rows, columns=columns)
        return frame.sort_values(["batch", "frames", "call", "kind"], ignore_index=True)

    def __str__(self) -> str:
        kinds, reasons = self.kinds, self.fallbacks
        why = f" ({', '.join(f'{reason} {n}' for reason, n in sorted(reasons.items()))})" if reasons else ""
        return (
            f"{self.calls} calls, hit rate {self.hit_rate:.2f}: {kinds['exact']} exact, {kinds['padded']} padded, {kinds['split']} split, "
            f"{self.compiled_hits} compiled; {kinds['fallback']} eager{why}; {self.padded_frames} frames of padding"
        )

    def __repr__(self) -> str:
        return f"<ReplayStats {self}>"

    def _repr_html_(self) -> str:
        found, counts = Counter[tuple[str, str]](), self.counts()
        for (_, outcome), n in counts.items():
            found[f"{outcome.kind}{' compiled' * outcome.compiled}", str(outcome.reason or "")] += n
        calls = sum(counts.values())
        rows = [[kind, reason, n, f"{n / calls:.1%}"] for (kind, reason), n in sorted(found.items())]
        misses = sum(n for (_, reason), n in found.items() if reason)
        padding = sum(n * outcome.padding for (_, outcome), n in counts.items())
        title = f"ReplayStats: {calls:,} calls, hit rate {(calls - misses) / max(calls, 1):.2f}, {padding:,} frames of padding"
        return table(title, ["served", "reason", "calls", "share"], rows)
