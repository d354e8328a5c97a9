"""What a plan is expected to bring: the figures, the curve of each further graph, a verdict in words."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from omnigraph._html import table
from omnigraph._needs import need
from omnigraph.shapes import Bucket, BucketPlan, Calls, Cost, Route, Shape, route

if TYPE_CHECKING:
    from pandas import DataFrame

    from omnigraph.profile import Profile

SHOWN = 24  # buckets listed in the printed report
HARDLY = 0.02  # a smaller share of the eager time saved is not worth a verdict of "pays"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What calls take with certain graphs: milliseconds a call (mean and percentiles), shares from 0 to 1, pool, warm-up."""

    name: str
    graphs: int
    ms: float
    p50: float
    p95: float
    p99: float
    hit_rate: float
    padded_share: float
    pool_bytes: int
    warmup_seconds: float


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The mean time of a call with the best set found of at most `graphs` graphs, and what that set takes."""

    graphs: int
    ms: float
    pool_bytes: int
    warmup_seconds: float
    buckets: tuple[Bucket, ...]


class Routes:
    """`route` among many buckets, each call seeing only the cheapest of each batch size that holds it: the others cannot win."""

    def __init__(self, buckets: Iterable[Bucket], cost: Cost, *, pad_frames: bool, pad_batch: bool, split: bool) -> None:
        self.cost, self.pad_frames, self.pad_batch, self.split = cost, pad_frames, pad_batch, split
        self._cheapest: dict[int, tuple[list[int], list[Bucket]]] = {}  # of a batch size: lengths, and the best from each on
        best: dict[int, tuple[float, bool, int, Bucket]] = {}
        for bucket in sorted(buckets, key=lambda b: -b.shape.frames):
            (batch, frames), compiled = bucket
            rank = (cost(bucket.shape, "compiled" if compiled else "plain"), not compiled, frames, bucket)
            lengths, cheapest = self._cheapest.setdefault(batch, ([], []))
            longer = batch in best and (pad_frames or best[batch][2] == frames)
            best[batch] = min(rank, best[batch]) if longer else rank
            lengths.append(-frames)
            cheapest.append(best[batch][3])

    def seen(self, shape: Shape) -> tuple[Bucket, ...]:
        """The buckets that may serve a call of `shape`: one of each batch size at most."""
        seen = []
        for lengths, cheapest in self._cheapest.values():
            at = bisect_right(lengths, -shape.frames)
            if at:
                seen.append(cheapest[at - 1])
        return tuple(seen)

    def of(self, shape: Shape) -> Route:
        """What `route` picks for a call of `shape`."""
        return route(shape, self.seen(shape), self.cost, pad_frames=self.pad_frames, pad_batch=self.pad_batch, split=self.split)

    def ms(self, taken: Route) -> float:
        """Milliseconds of a call that takes a route."""
        if not taken.parts:
            return self.cost(taken.shape, "eager")
        return sum(self.cost(b.shape, "compiled" if b.compiled else "plain") for b, _ in taken.parts)


def expect(name: str, buckets: Sequence[Bucket], calls: Calls, profile: Profile, cost: Cost, **pad: bool) -> Expectation:
    """Route every call among `buckets` as the decoder would and sum up. `pad` are the flags of `route`."""
    routes = Routes(buckets, cost, **pad)
    times, hits, padding, decoded = [], 0, 0, 0
    for shape, n in calls.items():
        taken = routes.of(shape)
        times.append((routes.ms(taken), n))
        hits += n * bool(taken.parts)
        padding += n * taken.padding
        decoded += n * (shape.batch * shape.frames + taken.padding)
    times.sort()
    total = sum(calls.values())
    seen = list(accumulate(n for _, n in times))
    p50, p95, p99 = (times[bisect_left(seen, q * total)][0] for q in (0.5, 0.95, 0.99))
    return Expectation(
        name,
        len(buckets),
        sum(ms * n for ms, n in times) / total,
        p50,
        p95,
        p99,
        hits / total,
        padding / decoded,
        profile.pool_bytes(buckets),
        profile.warmup_seconds(buckets),
    )


@dataclass(frozen=True)
class PlanReport:
    """What `plan_buckets` chose, and what it is expected to bring.

    `plan` is None where no graph that fits the limits saves any time. `eager`, `chosen`, `heuristic` (the chunking heuristic, or
    the baseline given) and `floor` (a graph for every candidate: no plan of these is faster) are milliseconds a call and more.
    `bound` is a time a call that no plan within the limits beats. `curve` is what each further graph brings, limits apart.
    """

    plan: BucketPlan | None
    eager: Expectation
    chosen: Expectation
    heuristic: Expectation
    floor: Expectation
    bound: float
    curve: tuple[CurvePoint, ...]
    calls: int
    method: str
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """How far the plan may be from the optimum, as a share of its bound; 0 where it is optimal."""
        gap = self.chosen.ms / self.bound - 1
        return gap if gap > 1e-6 else 0.0

    @property
    def over_floor(self) -> float:
        """How much longer calls take than with a graph for every candidate, as a share."""
        return self.chosen.ms / self.floor.ms - 1

    @property
    def payback(self) -> int | None:
        """Calls after which the warm-up has paid back; None where it never does."""
        saved = self.eager.ms - self.chosen.ms
        return math.ceil(self.chosen.warmup_seconds * 1e3 / saved) if saved > 0 else None

    @property
    def knee(self) -> int:
        """The number of graphs after which each further one brings much less.

        Where the curve, scaled to a unit square, is farthest above the straight line between its ends ("kneedle", Satopää et
        al., 2011). 0 where no graph saves anything.
        """
        first, last = self.curve[0], self.curve[-1]
        if last.graphs == 0:
            return 0
        above = [(first.ms - p.ms) / (first.ms - last.ms) - p.graphs / last.graphs for p in self.curve]
        return self.curve[above.index(max(above))].graphs

    @property
    def verdict(self) -> str:
        """Whether graphs pay here, in words."""
        eager, chosen, n = self.eager.ms, self.chosen.ms, len(self.plan or ())
        if self.plan is None:
            if self.floor.ms < eager:
                return "No graph fits the limits: raise them, or decode eagerly."
            return "Graphs don't pay here: for no call is a replay faster than eager."
        graphs = f"{n} graph{'s' * (n != 1)}"
        speed = f"{graphs} take{'s' * (n == 1)} {chosen:.3g} ms a call where eager takes {eager:.3g} ({eager / chosen:.2f} times as fast)"
        if 1 - chosen / eager < HARDLY:
            return f"Graphs hardly pay here: {speed}."
        payback = f"the warm-up of {self.chosen.warmup_seconds:.3g} s pays back after {self.payback:,} calls"
        if self.payback is not None and self.payback > self.calls:
            return f"Graphs pay only on more traffic than this: {speed}, and {payback}; here are {self.calls:,}."
        return f"Graphs pay: {speed}; {payback}."

    def to_frame(self) -> DataFrame:
        """Eager, the plan, the heuristic and the floor side by side, a row each."""
        rows = [asdict(e) for e in (self.eager, self.chosen, self.heuristic, self.floor)]
        frame: DataFrame = need("pandas").DataFrame(rows).set_index("name")
        return frame

    def curve_frame(self) -> DataFrame:
        """A row for each number of graphs: ms a call, ms saved by the last graph, pool bytes, warm-up seconds, buckets."""
        rows = [
            {
                "graphs": p.graphs,
                "ms": p.ms,
                "saved_ms": before.ms - p.ms,
                "pool_bytes": p.pool_bytes,
                "warmup_seconds": p.warmup_seconds,
                "buckets": " ".join(map(str, p.buckets)),
            }
            for before, p in zip((self.curve[0], *self.curve), self.curve, strict=False)
        ]
        frame: DataFrame = need("pandas").DataFrame(rows)
        return frame

    def __str__(self) -> str:
        heads = ("", "graphs", "ms/call", "p50", "p95", "p99", "hits", "padding", "pool MiB", "warm-up s")
        lines: list[tuple[str, ...]] = [heads]
        for e in (self.eager, self.chosen, self.heuristic, self.floor):
            times = tuple(f"{t:.3f}" for t in (e.ms, e.p50, e.p95, e.p99))
            shares = (f"{e.hit_rate:.1%}", f"{e.padded_share:.1%}")
            lines.append((e.name, str(e.graphs), *times, *shares, f"{e.pool_bytes / 2**20:.1f}", f"{e.warmup_seconds:.2f}"))
        widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
        lined_up = [
            "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        ]
        proven = "Optimal" if not self.gap else f"At most {max(self.gap, 1e-4):.2%} over the optimum"
        names = list(map(str, self.plan.buckets[::-1])) if self.plan else ["none"]
        about = [
            self.verdict,
            f"Plan: {' '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' * (len(names) > SHOWN)}.",
            f"{proven} ({self.method}), {self.over_floor:.2%} over the floor; the knee is at {self.knee} graph{'s' * (self.knee != 1)}.",
        ]
        return "\n".join([*lined_up, "", *about, *(f"Note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        heads = ["", "graphs", "ms a call", "p50", "p95", "p99", "hits", "padding", "pool MiB", "warm-up s"]
        rows = [
            [
                e.name,
                e.graphs,
                e.ms,
                e.p50,
                e.p95,
                e.p99,
                f"{e.hit_rate:.1%}",
                f"{e.padded_share:.1%}",
                e.pool_bytes / 2**20,
                e.warmup_seconds,
            ]
            for e in (self.eager, self.chosen, self.heuristic, self.floor)
        ]
        return table(self.verdict, heads, rows, str(self).split("\n\n", 1)[1].split("\n")[1:])
