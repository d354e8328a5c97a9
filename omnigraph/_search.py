"""The choice of buckets as an optimisation problem: its exact evaluation, and a greedy search with local improvement."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from omnigraph._needs import need
from omnigraph.shapes import Bucket, Shape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]
    Bools = npt.NDArray[np.bool_]

_CELLS = 4_000_000  # numbers held at once while many sets are evaluated
SAME = 1e-9  # two totals that differ by less than this share are one


@dataclass(frozen=True, eq=False)
class Problem:
    """Calls (`shapes`, how often: `weight`, their `eager` ms), candidates (`buckets`, by length) and what they cost, and limits.

    Of a bucket: `ms` of a replay, bytes it adds to the pool (`marginal`) and those it takes beyond that if it stands for the
    scratch memory of all (`extra`), `seconds` of warm-up.
    """

    shapes: tuple[Shape, ...]
    weight: Floats
    eager: Floats
    buckets: tuple[Bucket, ...]
    ms: Floats
    marginal: Floats
    extra: Floats
    seconds: Floats
    max_graphs: float = math.inf
    max_bytes: float = math.inf
    max_seconds: float = math.inf
    pad_frames: bool = True
    pad_batch: bool = True
    split: bool = True

    @cached_property
    def rows(self) -> tuple[Ints, Ints]:
        """Batch and frames of the calls."""
        return tuple(need("numpy").array(self.shapes, dtype=int).reshape(-1, 2).T)

    @cached_property
    def sizes(self) -> tuple[Ints, Ints]:
        """Batch and frames of the candidates."""
        return tuple(need("numpy").array([b.shape for b in self.buckets], dtype=int).reshape(-1, 2).T)

    @property
    def none(self) -> Bools:
        chosen: Bools = need("numpy").zeros(len(self.buckets), dtype=bool)
        return chosen

    def pool(self, sets: Bools) -> Floats:
        """Bytes of the pool for each of the `sets` `[S, candidates]`."""
        held: Floats = sets @ self.marginal + need("numpy").where(sets, self.extra, 0.0).max(axis=1, initial=0.0)
        return held

    def fits(self, sets: Bools) -> Bools:
        """Which of the `sets` `[S, candidates]` keep to the limits, up to rounding."""
        slack = 1 + 1e-9
        within: Bools = (
            (sets.sum(axis=1) <= self.max_graphs)
            & (self.pool(sets) <= self.max_bytes * slack)
            & (sets @ self.seconds <= self.max_seconds * slack)
        )
        return within

    def totals(self, sets: Bools) -> Floats:
        """Milliseconds of all calls under each of the `sets` `[S, candidates]`: what `route` would choose, for many at once."""
        np = need("numpy")
        step = max(_CELLS // (len(np.unique(self.rows[1])) * (self.rows[0].max() + len(np.unique(self.sizes[0])) + 1)), 1)
        parts = [self._totals(sets[i : i + step]) for i in range(0, len(sets), step)]
        totals: Floats = np.concatenate([np.zeros(0), *parts])
        return totals

    def _totals(self, sets: Bools) -> Floats:
        np = need("numpy")
        lengths, where = np.unique(self.rows[1], return_inverse=True)
        cheapest: dict[int, Floats] = {}  # of each batch size, the cheapest chosen bucket that holds each length: [S, lengths]
        for batch in np.unique(self.sizes[0]).tolist():
            these = np.flatnonzero(self.sizes[0] == batch)
            frames, first = np.unique(self.sizes[1][these], return_index=True)
            each = np.minimum.reduceat(np.where(sets[:, these], self.ms[these], np.inf), first, axis=1)
            if self.pad_frames:
                each = np.minimum.accumulate(each[:, ::-1], axis=1)[:, ::-1]
            at = np.searchsorted(frames, lengths)
            if not self.pad_frames:
                at = np.where(np.append(frames, -1)[at] == lengths, at, len(frames))
            cheapest[batch] = np.pad(each, ((0, 0), (0, 1)), constant_values=np.inf)[:, at]
        done = [np.zeros((len(sets), len(lengths)))]  # the recurrence of `route`, over rows still to be served
        for n in range(1, self.rows[0].max() + 1):
            best = np.full_like(done[0], np.inf)
            for batch, paid in cheapest.items():
                if (batch <= n or self.pad_batch) and (self.split or batch >= n):
                    np.minimum(best, paid + done[max(n - batch, 0)], out=best)
            done.append(best)
        total: Floats = np.zeros(len(sets))
        for n in np.unique(self.rows[0]).tolist():
            calls = self.rows[0] == n
            total += np.minimum(done[n][:, where[calls]], self.eager[calls]) @ self.weight[calls]
        return total

    def picked(self, chosen: Bools) -> tuple[Bucket, ...]:
        """The buckets of a set."""
        return tuple(bucket for bucket, there in zip(self.buckets, chosen.tolist(), strict=True) if there)

    def total(self, chosen: Bools) -> float:
        return float(self.totals(chosen[None])[0])


def each_with(chosen: Bools, change: Ints) -> Bools:
    """Copies of `chosen`, one for each of `change` with that entry flipped."""
    np = need("numpy")
    sets = np.repeat(chosen[None], len(change), axis=0)
    sets[np.arange(len(change)), change] ^= True
    flipped: Bools = sets
    return flipped


def greedy(p: Problem, allowed: Bools, chosen: Bools, by_size: bool = False) -> Iterator[tuple[Bools, float]]:
    """Add the bucket that saves most (`by_size`: for the share of the limits that it takes), as long as one saves and fits."""
    np = need("numpy")
    chosen, now = chosen.copy(), p.total(chosen)
    room = (
        p.marginal / p.max_bytes + p.seconds / p.max_seconds + 1 / min(p.max_graphs, len(p.buckets)) if by_size else np.ones(len(p.buckets))
    )
    while True:
        left = np.flatnonzero(allowed & ~chosen)
        sets = each_with(chosen, left)
        left, sets = left[fitting := p.fits(sets)], sets[fitting]
        if not len(left):
            return
        saved = now - p.totals(sets)
        pick = int(np.argmax(saved / room[left]))
        if saved[pick] <= SAME * now:
            return
        chosen, now = sets[pick], now - float(saved[pick])
        yield chosen, now


def improve(p: Problem, chosen: Bools, deadline: float) -> Bools:
    """Add a bucket, or swap one, as long as that helps; until nothing does, or time is over."""
    np, now = need("numpy"), p.total(chosen)
    since, turn = 0, 0
    while since <= (inside := np.flatnonzero(chosen)).size and time.perf_counter() < deadline:
        start = chosen if turn == 0 else each_with(chosen, inside[turn - 1 : turn])[0]
        sets = each_with(start, np.flatnonzero(~chosen))
        sets = sets[p.fits(sets)]
        totals = p.totals(sets)
        since, turn = since + 1, (turn + 1) % (inside.size + 1)
        if totals.min(initial=np.inf) < now * (1 - SAME):
            now, chosen, since = float(totals.min()), sets[int(totals.argmin())], 0
    return chosen


def search(p: Problem, start: Bools, deadline: float) -> Bools:
    """The best of several greedy searches, improved: among all candidates, and among those of little scratch memory only."""
    np = need("numpy")
    best, least = (start, p.total(start)) if p.fits(start[None])[0] else (p.none, p.total(p.none))
    if min(p.max_bytes, p.max_seconds) < np.inf:
        caps = [np.inf] if p.max_bytes == np.inf else [np.inf, *np.quantile(p.extra, (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)).tolist()]
        for cap in caps:
            for by_size in (False, True):
                for chosen, total in greedy(p, p.extra <= cap, p.none, by_size):
                    if total < least:
                        best, least = chosen, total
                if time.perf_counter() > deadline:
                    return best
    return improve(p, best, deadline)


def prune(p: Problem, chosen: Bools) -> Bools:
    """Drop what no call gains from, the largest first."""
    np, now = need("numpy"), p.total(chosen)
    for i in sorted(np.flatnonzero(chosen).tolist(), key=lambda i: -p.extra[i] - p.marginal[i]):
        less = each_with(chosen, np.array([i]))[0]
        total = p.total(less)
        if total <= now * (1 + SAME * 1e-3):
            chosen, now = less, min(now, total)
    return chosen
