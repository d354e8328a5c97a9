"""Buckets as a mixed-integer program, through scipy's HiGHS: optimal sets for small problems, bounds for larger ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from omnigraph._needs import need
from omnigraph._search import SAME, Problem

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]
    Bools = npt.NDArray[np.bool_]

# uses of buckets by calls, up to which the program is solved in a moment, is tried, and its relaxation is solved
FAST, EXACT, RELAXED = 1_000, 6_000, 60_000
_CELLS = 8  # ranges of scratch memory that are solved one by one


class _Program:
    """Minimise c @ v subject to rows of `low <= A @ v <= high`, built up piece by piece."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.integer: list[bool] = []
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def variable(self, cost: float, upper: float, integer: bool) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, entries: Sequence[tuple[int, float]], low: float, high: float) -> None:
        self.entries += [(len(self.low), column, value) for column, value in entries]
        self.low.append(low)
        self.high.append(high)


def grouped(p: Problem) -> Iterator[tuple[int, int, Ints]]:
    """Calls that the same buckets hold, as one: batch, frames, and which calls they are."""
    np = need("numpy")
    key = np.searchsorted(np.unique(p.sizes[1]), p.rows[1]) if p.pad_frames else p.rows[1]
    groups: dict[tuple[int, int], list[int]] = {}
    for i, (batch, k) in enumerate(zip(p.rows[0].tolist(), key.tolist(), strict=True)):
        groups.setdefault((batch, k), []).append(i)
    for (batch, _), calls in groups.items():
        yield batch, int(p.rows[1][calls].max()), np.array(calls)


class Relaxation:
    """The program: which buckets to capture (x), and which of them serve the calls of each shape.

    A call of n rows goes eager, or to one bucket that holds it (y <= x), or is split: z replays of smaller buckets that have n
    rows in all. Both are what `route` may do, so the optimum of the program is that of the problem. The pool's bytes are those
    the buckets add and the most scratch memory of any. As a fraction of a bucket would bring a fraction of its scratch memory,
    the range of that is cut in cells, which are solved one by one; the bound is the least of theirs.
    """

    def __init__(self, p: Problem) -> None:
        np, self.p = need("numpy"), p
        self.program = prog = _Program()
        self.x = [prog.variable(0.0, 1.0, True) for _ in p.buckets]
        self.uses = 0
        self.base = 0.0
        for batch, frames, calls in grouped(p):
            weight, eager, slowest = p.weight[calls], p.eager[calls], float(p.eager[calls].max())
            paid = float(weight @ eager)
            self.base += paid
            holds = (p.sizes[1] >= frames if p.pad_frames else p.sizes[1] == frames) & (p.ms < slowest)
            one = np.flatnonzero(holds & (p.sizes[0] >= batch if p.pad_batch else p.sizes[0] == batch))
            served = []
            for j in one.tolist():
                y = prog.variable(float(weight @ np.minimum(p.ms[j] - eager, 0)), 1.0, False)
                prog.row([(y, 1.0), (self.x[j], -1.0)], -np.inf, 0.0)
                served.append((y, 1.0))
            parts = np.flatnonzero(holds & (p.sizes[0] < batch)) if p.split else np.zeros(0, dtype=int)
            if len(parts) and batch * (p.ms[parts] / p.sizes[0][parts]).min() < slowest:
                share = prog.variable(-paid, 1.0, True)
                served.append((share, 1.0))
                cover, pieces = [(share, -float(batch))], [(share, -float(-(-batch // int(p.sizes[0][parts].max()))))]
                for j in parts.tolist():
                    most = float(-(-batch // int(p.sizes[0][j])))
                    z = prog.variable(paid / slowest * float(p.ms[j]), most, True)
                    prog.row([(z, 1.0), (self.x[j], -most)], -np.inf, 0.0)
                    prog.row([(z, 1.0), (share, -most)], -np.inf, 0.0)
                    cover.append((z, float(p.sizes[0][j])))
                    pieces.append((z, 1.0))
                prog.row(cover, 0.0, np.inf if p.pad_batch else 0.0)
                prog.row(pieces, 0.0, np.inf)
                self.uses += len(parts)
            if served:
                prog.row(served, -np.inf, 1.0)
            self.uses += len(one)
        if p.max_graphs < len(p.buckets):
            prog.row([(x, 1.0) for x in self.x], 0.0, p.max_graphs)
        if p.max_seconds < np.inf:
            prog.row([(x, float(s / p.max_seconds)) for x, s in zip(self.x, p.seconds, strict=True)], 0.0, 1.0)
        self.scratch: int | None = None
        if p.max_bytes < np.inf:
            self.scratch = prog.variable(0.0, 1.0, False)
            added = [(x, float(n / p.max_bytes)) for x, n in zip(self.x, p.marginal, strict=True)]
            prog.row([*added, (self.scratch, 1.0)], 0.0, 1.0)
            for x, n in zip(self.x, p.extra, strict=True):
                prog.row([(x, float(n / p.max_bytes)), (self.scratch, -1.0)], -np.inf, 0.0)

    def _solve(self, low: float, high: float, integral: bool, seconds: float) -> tuple[Bools | None, float]:
        """One cell: its best set, if it was found, and its bound."""
        np, optimize, sparse = need("numpy"), need("scipy.optimize"), need("scipy.sparse")
        prog, p = self.program, self.p
        lower, upper = np.zeros(len(prog.cost)), np.array(prog.upper)
        if self.scratch is not None:
            lower[self.scratch], upper[self.scratch] = low / p.max_bytes, high / p.max_bytes
            upper[: len(self.x)] = p.extra <= high
        row, column, value = (np.array(part) for part in zip(*prog.entries, strict=True))
        matrix = sparse.csr_matrix((value, (row.astype(int), column.astype(int))), shape=(len(prog.low), len(prog.cost)))
        found: Any = optimize.milp(
            np.array(prog.cost),
            integrality=np.array(prog.integer, dtype=int) * integral,
            bounds=optimize.Bounds(lower, upper),
            constraints=optimize.LinearConstraint(matrix, np.array(prog.low), np.array(prog.high)),
            options={"time_limit": seconds, "mip_rel_gap": 1e-7},
        )
        if found.status == 2:  # infeasible: the cell is empty
            return None, np.inf
        bound = found.mip_dual_bound if integral else found.fun if found.status == 0 else None
        chosen = found.x[: len(self.x)] > 0.5 if integral and found.x is not None else None
        return chosen, self.base + (-np.inf if bound is None else float(bound))

    def solve(self, least: float, integral: bool, deadline: float) -> tuple[Bools | None, float]:
        """A set better than the total `least`, where there is one, and a bound that no set within the limits beats."""
        np, p = need("numpy"), self.p
        edges = [0.0, np.inf]
        if self.scratch is not None:
            levels = np.unique(p.extra)
            levels = levels[levels <= p.max_bytes]
            if not len(levels):
                return None, least
            edges = [0.0, *levels[np.linspace(0, len(levels) - 1, min(_CELLS, len(levels))).round().astype(int)].tolist()]
        best, bound = None, least
        floor = p.totals(np.stack([p.extra <= high for high in edges[1:]]))
        for n, (low, high) in enumerate(pairwise(edges)):
            if floor[n] >= least * (1 - SAME):
                continue  # not even all buckets of the cell and below would do
            seconds = (deadline - time.perf_counter()) / (len(edges) - 1 - n)
            chosen, reached = self._solve(low, high, integral, seconds) if seconds > 0.05 else (None, -np.inf)
            bound = min(bound, max(reached, float(floor[n])))
            if chosen is not None and p.fits(chosen[None])[0] and (total := p.total(chosen)) < least:
                best, least = chosen, total
        return best, min(bound, least)
