"""Buckets for calls of one batch size: dynamic programming along the lengths, exact for a limit on the number of graphs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from omnigraph._needs import need
from omnigraph._search import Problem

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]
    Bools = npt.NDArray[np.bool_]

_PRICES = 24  # multipliers tried for a limit


def is_line(p: Problem) -> bool:
    """Whether all calls and candidates are of one batch size."""
    return len({s.batch for s in p.shapes} | {b.shape.batch for b in p.buckets}) == 1


class Line:
    """The calls along their lengths.

    `gain[i, j]` is what bucket j saves on the calls longer than bucket i, up to its own length (`i = 0`: on all up to there).
    The best k buckets, of which j is the longest, save

        best[k, j] = max over i < j of best[k - 1, i] + gain[i, j]

    which is exact, also where a longer bucket is faster than a shorter one: a set in which that happens is no better than the
    set without the shorter one. It is the recurrence for k medians on a line (Hassin and Tamir, 1991), with eager calls beside.
    """

    def __init__(self, p: Problem) -> None:
        np = need("numpy")
        frames = p.rows[1]
        order = np.argsort(frames)
        saved = p.weight[order] * np.maximum(p.eager[order] - p.ms[:, None], 0)  # [candidates, calls]
        if not p.pad_frames:
            saved = np.where(frames[order] == p.sizes[1][:, None], saved, 0.0)
        upto = np.pad(np.cumsum(saved, axis=1), ((0, 0), (1, 0)))
        end = np.searchsorted(frames[order], p.sizes[1], side="right")
        m = len(p.buckets)
        self.p, self.m = p, m
        self.gain: Floats = np.full((m + 1, m), -np.inf)  # row 0: no shorter bucket
        own = upto[np.arange(m), end]
        self.gain[0] = own
        self.gain[1:] = np.where(np.arange(m)[:, None] < np.arange(m), own - upto[np.arange(m), end[:, None]], -np.inf)
        self.eager = float(p.weight @ p.eager)

    def levels(self, price: Floats, most: int) -> tuple[Floats, Ints]:
        """`best[k, j]` less the `price` of each bucket for k up to `most`, and the shorter neighbour i (0: none) that gives it."""
        np = need("numpy")
        best, came = np.full((most, self.m), -np.inf), np.zeros((most, self.m), dtype=int)
        best[0] = self.gain[0] - price
        for k in range(1, most):
            sums = best[k - 1][:, None] + self.gain[1:]
            came[k] = sums.argmax(axis=0) + 1
            best[k] = sums[came[k] - 1, np.arange(self.m)] - price
        return best, came

    def free(self, price: Floats) -> tuple[Floats, Ints]:
        """As `levels`, for any number of buckets: `[1, candidates]`."""
        np = need("numpy")
        best, came = np.zeros(self.m + 1), np.zeros(self.m, dtype=int)
        for j in range(self.m):
            sums = best[: j + 1] + self.gain[: j + 1, j]
            came[j] = sums.argmax()
            best[j + 1] = sums[came[j]] - price[j]
        return best[None, 1:], came[None]

    def chosen(self, came: Ints, k: int, j: int) -> Bools:
        """The buckets on the way to `best[k, j]`."""
        picked, single = self.p.none, len(came) == 1
        while True:
            picked[j] = True
            back = int(came[k, j])
            if not back or (k == 0 and not single):
                return picked
            k, j = (k if single else k - 1), back - 1

    def curve(self, most: int) -> list[Bools]:
        """The best set of at most 0, 1, 2, ... buckets, as far as one more helps."""
        np = need("numpy")
        most = min(most, self.m)
        best, came = self.levels(np.zeros(self.m), most)
        sets, least = [self.p.none], 0.0
        for k, row in enumerate(best):
            better = row.max() > least + 1e-12 * self.eager
            least = max(least, float(row.max()))
            sets.append(self.chosen(came, k, int(row.argmax())) if better else sets[-1])
        while len(sets) > 1 and sets[-1] is sets[-2]:
            sets.pop()
        return sets

    def priced(self) -> tuple[Bools, float]:
        """A good set within all limits and a bound on the best total: Lagrangian relaxation of bytes and seconds.

        With a price on each byte and second, the recurrence is exact for each longest bucket L, hence for the scratch memory
        that L stands for. So each L has a bound of its own, the best over all prices tried, and the smallest is the bound.
        """
        np, p = need("numpy"), self.p
        bytes_left, most = p.max_bytes - p.extra, int(min(p.max_graphs, self.m))
        scratch = np.maximum.accumulate(p.extra)  # of a set whose longest bucket is j: at least its own, at most this
        bound, best, least = np.full(self.m, -np.inf), p.none, self.eager
        scale = [self.eager / room if 0 < room < np.inf else 0.0 for room in (p.max_bytes, p.max_seconds)]
        grid = [2.0 * 4.0**-n for n in range(_PRICES // 2)] if all(scale) else [2.0 * 2.0**-n for n in range(_PRICES)]
        for prices in itertools.product(*([0.0, *(s * g for g in grid)] if s else [0.0] for s in scale)):
            price = prices[0] * p.marginal + prices[1] * p.seconds
            values, came = self.levels(price, most) if most < self.m else self.free(price)
            room = (prices[0] * bytes_left if prices[0] else 0.0) + (prices[1] * p.max_seconds if prices[1] else 0.0)
            bound = np.maximum(bound, self.eager - values.max(axis=0) - room)
            spent = self._spent(came, np.stack([p.marginal, p.seconds]))
            total = self.eager - values - (spent[0] * prices[0] + spent[1] * prices[1])
            ok = (spent[0] + scratch <= p.max_bytes) & (spent[1] <= p.max_seconds) & (total < least)
            if ok.any():
                k, j = np.unravel_index(np.where(ok, total, np.inf).argmin(), ok.shape)
                least, best = float(total[k, j]), self.chosen(came, int(k), int(j))
        allowed = (p.extra + p.marginal <= p.max_bytes) & (p.seconds <= p.max_seconds)
        return best, float(min(self.eager, bound[allowed].min(initial=np.inf)))

    def _spent(self, came: Ints, each: Floats) -> Floats:
        """Sums of `each` `[2, candidates]` on the way to every `best[k, j]`: `[2, k, candidates]`."""
        np, single = need("numpy"), len(came) == 1
        spent: Floats = np.zeros((2, *came.shape))
        for k in range(len(came)):
            before = np.pad(spent[:, k - 1 if not single else k], ((0, 0), (1, 0)))
            if single:
                for j in range(self.m):
                    before[:, j + 1] = spent[:, 0, j] = each[:, j] + before[:, came[0, j]]
            else:
                spent[:, k] = each + (before[:, came[k]] if k else 0.0)
        return spent
