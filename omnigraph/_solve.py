"""Solve the choice of buckets: which method for which problem."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from omnigraph._line import Line, is_line
from omnigraph._needs import need
from omnigraph._relax import EXACT, FAST, RELAXED, Relaxation
from omnigraph._search import Problem, greedy, improve, prune, search

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bools = npt.NDArray[np.bool_]

CLOSE = 1.001  # a plan within this factor of its bound is not worth seconds of search
MOST_ON_A_LINE, MOST = 128, 32  # graphs up to which the curve goes, for one batch size and for several


def best_of_each_number(p: Problem, deadline: float) -> list[Bools]:
    """The best sets of at most 0, 1, 2, ... buckets, limits apart: optimal for one batch size, the greedy search's for several."""
    inf = float("inf")
    free = replace(p, max_graphs=inf, max_bytes=inf, max_seconds=inf)
    if is_line(p):
        return Line(free).curve(int(max(MOST_ON_A_LINE, min(p.max_graphs, len(p.buckets)))))
    sets = [p.none]
    for more, _ in greedy(free, ~p.none, p.none):
        sets.append(more)
        if len(sets) > max(MOST, min(p.max_graphs, len(p.buckets))) or time.perf_counter() > deadline:
            break
    return sets


def solve(p: Problem, start: Bools, deadline: float) -> tuple[Bools, float, str]:
    """The best set found, a bound on the best total there is, and how they were found. `start` is a good set, maybe beyond limits."""
    np = need("numpy")
    everything = prune(p, ~p.none)
    if p.fits(everything[None])[0]:
        return everything, p.total(everything), "every bucket that helps"
    if is_line(p):
        method = "dynamic programming"
        if min(p.max_bytes, p.max_seconds) == np.inf:
            return start, p.total(start), method
        chosen, bound = Line(p).priced()
        chosen = improve(p, chosen, min(deadline, time.perf_counter() + 1.0))
        method += " with priced limits"
    else:
        chosen, bound = search(p, start, (time.perf_counter() + deadline) / 2), p.total(~p.none)
        method = "greedy search with local improvement"
    total = p.total(chosen)
    if total > bound * (1 + 1e-6):
        relaxation = Relaxation(p)
        exact = relaxation.uses <= (EXACT if total > bound * CLOSE else FAST)
        if exact or (relaxation.uses <= RELAXED and not is_line(p)):
            better, reached = relaxation.solve(total, exact, deadline)
            chosen, bound = chosen if better is None else better, max(bound, reached)
            method = "mixed-integer program" if exact else f"{method}, bounded by the relaxation"
    chosen = prune(p, chosen)
    return chosen, min(bound, p.total(chosen)), method
