"""What a plan would do to a histogram of calls, as the tables that figures draw: fast enough to follow a slider."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from omnigraph._needs import need
from omnigraph._report import Routes
from omnigraph.profile import Profile
from omnigraph.shapes import MAX_WASTE, Bucket, BucketPlan, Calls, Cost, How, Route, Shape, route
from omnigraph.stats import Fallback, outcome

if TYPE_CHECKING:
    import pandas as pd

SCRATCH = "scratch of all"


class Padding(NamedTuple):
    """What may be done to a call: the flags of `route`."""

    pad_frames: bool = True
    pad_batch: bool = True
    split: bool = True


ALL = Padding()


@dataclass(frozen=True, eq=False)
class Prediction:
    """Tables for the figures, and a summary.

    `calls`, a row a shape: batch, frames, kind, compiled, bucket, reason, calls, padded_frames (of all these calls), eager_ms, ms.
    `work`, a row a bucket, the smallest first, then "eager": bucket, replays, asked_frames, padded_frames.
    `costs`, a row a bucket, then the scratch memory that all share: bucket, mib, seconds. They add up to the pool and the warm-up.
    `summary`: graphs, calls, hit_rate and padded_share (0 to 1), ms and eager_ms a call, pool_bytes, warmup_seconds.
    """

    calls: pd.DataFrame
    work: pd.DataFrame
    costs: pd.DataFrame
    summary: dict[str, float]

    def latency(self, name: str = "this plan") -> pd.DataFrame:
        """Times with their counts, eager and under the plan: way, ms, calls."""
        ways = [self.calls[["calls"]].assign(way=way, ms=self.calls[ms]) for way, ms in (("eager", "eager_ms"), (name, "ms"))]
        frame: pd.DataFrame = need("pandas").concat(ways, ignore_index=True)
        return frame[["way", "ms", "calls"]]

    def against(self, measured: pd.DataFrame) -> pd.DataFrame:
        """The shapes that were also measured (`Driven.to_frame()`): shape, kind, calls, predicted_ms, measured_ms and its _q1, _q3."""
        names = {"decode_ms": "measured_ms", "decode_ms_q1": "measured_ms_q1", "decode_ms_q3": "measured_ms_q3"}
        rows = measured.rename(columns=names)[["batch", "frames", "shape", "kind", "calls", *names.values()]]
        predicted = self.calls[["batch", "frames", "ms"]].rename(columns={"ms": "predicted_ms"})
        return rows.merge(predicted, on=["batch", "frames"]).drop(columns=["batch", "frames"])


def predictor(calls: Calls, profile: Profile, *, by_frames: bool = False) -> Callable[[BucketPlan | None, Padding], Prediction]:
    """Make ready to predict plans for `calls` (how often each shape is called) at the times of `profile`.

    What it returns takes a plan (None: all eager) and what may be done to calls, and is cheap to call again: eager times are looked up
    once, and calls of one batch size that see the same buckets are routed once for all. Calls take what costs least by the profile, as
    in a decoder with `cost=profile.cost`; `by_frames`: as in one without a cost.

    Raises:
        ValueError: no calls, or the profile lacks times that the plan needs.
    """
    shapes = [Shape(*shape) for shape, n in sorted(calls.items()) if n]
    if not shapes:
        raise ValueError("there are no calls to predict: give a histogram of shapes, each called at least once")
    counts = [calls[shape] for shape in shapes]
    eager = dict(zip(shapes, profile.costs(shapes, "eager").tolist(), strict=True))

    def predict(plan: BucketPlan | None, padding: Padding = ALL) -> Prediction:
        buckets = plan.buckets if plan else ()
        prices = dict(zip(buckets, profile.each(buckets).tolist(), strict=True))
        routing = (_ByFrames if by_frames else _Routing)(
            buckets, lambda shape, how: eager[shape] if how == "eager" else prices[Bucket(shape, how == "compiled")], padding
        )
        rows, work = [], _Work(buckets)
        for shape, n in zip(shapes, counts, strict=True):
            taken, ms = routing.of(shape)
            work.add(taken, n)
            served = outcome(taken)
            reason = str(served.reason or "") if plan else str(Fallback.DISABLED)
            bucket = " + ".join(map(str, served.buckets))
            rows.append((*shape, served.kind, served.compiled, bucket, reason, n, n * served.padding, eager[shape], ms))
        names = ["batch", "frames", "kind", "compiled", "bucket", "reason", "calls", "padded_frames", "eager_ms", "ms"]
        frame: pd.DataFrame = need("pandas").DataFrame(rows, columns=names)
        total, done = sum(counts), work.to_frame()
        costs = _costs(buckets, profile)
        padded, asked = float(done["padded_frames"].sum()), float(done["asked_frames"].sum())
        summary = {
            "graphs": len(buckets),
            "calls": total,
            "hit_rate": 1 - float(frame["calls"][frame["kind"] == "fallback"].sum()) / total,
            "padded_share": padded / (padded + asked),
            "ms": float((frame["ms"] * frame["calls"]).sum()) / total,
            "eager_ms": float((frame["eager_ms"] * frame["calls"]).sum()) / total,
            "pool_bytes": float(costs["mib"].sum()) * 2**20,
            "warmup_seconds": float(costs["seconds"].sum()),
        }
        return Prediction(frame, done, costs, summary)

    return predict


class _Routing:
    """`route` for many calls: those of one batch size that see the same buckets take the same replays, where eager isn't faster."""

    def __init__(self, buckets: tuple[Bucket, ...], cost: Cost, padding: Padding) -> None:
        self.cost, self.padding = cost, padding
        self.routes = Routes(buckets, self._graph_only, **padding._asdict())
        self.lengths = {bucket.shape.frames for bucket in buckets}
        self.known: dict[tuple[int, tuple[Bucket, ...]], tuple[Route, float]] = {}

    def _graph_only(self, shape: Shape, how: How) -> float:
        return math.inf if how == "eager" else self.cost(shape, how)

    def of(self, shape: Shape) -> tuple[Route, float]:
        """The route of a call, and its milliseconds."""
        eager = self.cost(shape, "eager")
        if not self.padding.pad_frames and shape.frames not in self.lengths:
            return Route(shape, (), "no_bucket"), eager
        key = shape.batch, self.routes.seen(shape)
        if key not in self.known:
            taken = route(shape, key[1], self._graph_only, **self.padding._asdict())
            self.known[key] = taken, self.routes.ms(taken)
        taken, ms = self.known[key]
        if not taken.parts:
            return Route(shape, (), "no_bucket"), eager
        if math.isclose(ms, eager, rel_tol=1e-12):  # the order in which times are added decides: ask
            taken = route(shape, key[1], self.cost, **self.padding._asdict())
            return taken, ms if taken.parts else eager
        return (Route(shape, taken.parts), ms) if ms < eager else (Route(shape, (), "eager_is_faster"), eager)


class _ByFrames(_Routing):
    """The same where calls cost the frames they decode, and eager serves those that a bucket would pad too much."""

    def _graph_only(self, shape: Shape, how: How) -> float:
        return shape.batch * shape.frames

    def of(self, shape: Shape) -> tuple[Route, float]:
        if not self.padding.pad_frames and shape.frames not in self.lengths:
            return Route(shape, (), "no_bucket"), self.cost(shape, "eager")
        key = shape.batch, self.routes.seen(shape)
        if key not in self.known:
            taken = route(shape, key[1], max_waste=math.inf, **self.padding._asdict())
            self.known[key] = taken, sum(self.cost(b.shape, "compiled" if b.compiled else "plain") for b, _ in taken.parts)
        taken, ms = self.known[key]
        if not taken.parts:
            return Route(shape, (), "no_bucket"), self.cost(shape, "eager")
        decoded = sum(b.shape.batch * b.shape.frames for b, _ in taken.parts)
        if decoded > MAX_WASTE * shape.batch * shape.frames:
            return Route(shape, (), "too_much_padding"), self.cost(shape, "eager")
        return Route(shape, taken.parts), ms


class _Work:
    """Replays and frames of each bucket."""

    def __init__(self, buckets: tuple[Bucket, ...]) -> None:
        self.names = [*map(str, reversed(buckets)), "eager"]
        self.replays, self.asked, self.padded = Counter[str](), Counter[str](), Counter[str]()

    def add(self, taken: Route, times: int) -> None:
        batch, frames = taken.shape
        for bucket, rows in taken.parts:
            name, size = str(bucket), bucket.shape.batch * bucket.shape.frames
            self.replays[name] += times
            self.asked[name] += times * rows * frames
            self.padded[name] += times * (size - rows * frames)
        if not taken.parts:
            self.asked["eager"] += times * batch * frames

    def to_frame(self) -> pd.DataFrame:
        rows = [(name, self.replays[name], self.asked[name], self.padded[name]) for name in self.names]
        frame: pd.DataFrame = need("pandas").DataFrame(rows, columns=["bucket", "replays", "asked_frames", "padded_frames"])
        return frame


def _costs(buckets: tuple[Bucket, ...], profile: Profile) -> pd.DataFrame:
    """MiB that each bucket adds to the pool and seconds of its warm-up, and what of the pool belongs to none."""
    listed = buckets[::-1]
    own, seconds = (profile.each(listed, what) for what in ("bytes_marginal", "seconds"))
    scratch = profile.pool_bytes(listed) - float(own.sum())
    rows = [(str(b), nbytes / 2**20, s) for b, nbytes, s in zip(listed, own.tolist(), seconds.tolist(), strict=True)]
    rows += [(SCRATCH, scratch / 2**20, 0.0)] * bool(listed)
    frame: pd.DataFrame = need("pandas").DataFrame(rows, columns=["bucket", "mib", "seconds"])
    return frame
