"""Choose the buckets: the plan of least expected time for a histogram of calls, within limits on graphs, memory and warm-up."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from omnigraph._candidates import candidates, problem_of
from omnigraph._needs import need
from omnigraph._report import CurvePoint, Expectation, PlanReport, expect
from omnigraph._search import SAME, Problem
from omnigraph._solve import best_of_each_number, solve
from omnigraph.profile import Profile
from omnigraph.shapes import Bucket, BucketPlan, Calls, How, Shape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bools = npt.NDArray[np.bool_]

__all__ = ["Expectation", "PlanReport", "plan_buckets"]


def plan_buckets(
    calls: Calls,
    profile: Profile,
    max_graphs: int | None = None,
    max_bytes: float | None = None,
    max_seconds: float | None = None,
    compiled: Literal["all"] | Iterable[Sequence[int]] | None = None,
    *,
    baseline: BucketPlan | None = None,
    pad_frames: bool = True,
    pad_batch: bool = True,
    split: bool = True,
    search_seconds: float = 10.0,
) -> PlanReport:
    """Choose the buckets that give `calls` the least expected time.

    Every call costs what `route` would make it take, at the times of `profile`: a decoder that is given `cost=profile.cost`
    does the same. Candidates are the lengths called (and measured ones that are faster), for each batch size called or measured.

    Calls of one batch size are planned by dynamic programming along the lengths (`Line`): optimal for a limit on graphs, and
    with a proven gap for bytes and seconds. Several batch sizes, and gaps that remain, go to a mixed-integer program (`Relaxation`,
    HiGHS) where it is small; where it is large, a greedy search with local improvement finds the plan and a relaxation bounds it.
    Time grows with distinct shapes, not with calls: with the cube of the lengths at worst on the first way.

    Args:
        calls: how often each shape is called, from `Trace.calls` or `ReplayStats.to_calls`.
        profile: times, bytes and seconds of the model on the device.
        max_graphs: buckets in the plan.
        max_bytes: bytes of the pool that they share.
        max_seconds: seconds of their warm-up.
        compiled: "all", or shapes that may be compiled, where the profile holds compiled times.
        baseline: the plan to compare with; the chunking heuristic for 25 frames with 25 where left out.
        pad_frames, pad_batch, split: what may be done to a call, as in `route`.
        search_seconds: time for the search, beyond which the best plan so far is taken, with its gap.

    Raises:
        ValueError: no calls, a limit is not positive, or compiled buckets are asked of a profile without compiled times.
    """
    began = time.perf_counter()
    calls = _checked(calls, max_graphs, max_bytes, max_seconds)
    considered, everything, notes = candidates(calls, profile, compiled)
    problem = replace(
        problem_of(calls, profile, considered),
        max_graphs=max_graphs or math.inf,
        max_bytes=max_bytes or math.inf,
        max_seconds=max_seconds or math.inf,
        pad_frames=pad_frames,
        pad_batch=pad_batch,
        split=split,
    )
    sets = best_of_each_number(problem, began + search_seconds / 4)
    chosen, bound, method = solve(problem, sets[int(min(problem.max_graphs, len(sets) - 1))], began + search_seconds)
    picked = problem.picked(chosen)
    if baseline is None:
        most = max(shape.batch for shape in calls)
        baseline = BucketPlan.from_chunking(25, 25, [2**n for n in range(most.bit_length())])
    ways: list[tuple[Shape, How]] = [(s, "eager") for s in calls]
    for what, more in (("times", considered), ("of the heuristic's times", baseline.buckets)):
        ways += [(b.shape, _how(b)) for b in more]
        beyond = _outside(profile, ways)
        if beyond:
            shown = f"{', '.join(beyond[:4])}{' ...' * (len(beyond) > 4)}"
            notes.append(f"{len(beyond)} {what} are extrapolated beyond what was measured: {shown}")
        ways = []
    prices: dict[tuple[Shape, How], float] = {(s, "eager"): ms for s, ms in zip(calls, problem.eager.tolist(), strict=True)}
    for some in (everything, baseline.buckets):
        prices |= {(b.shape, _how(b)): ms for b, ms in zip(some, profile.each(some).tolist(), strict=True)}

    def cost(shape: Shape, how: How) -> float:
        return prices[shape, how]

    def expected(name: str, buckets: Sequence[Bucket]) -> Expectation:
        return expect(name, buckets, calls, profile, cost, pad_frames=pad_frames, pad_batch=pad_batch, split=split)

    return PlanReport(
        _plan(picked, profile.made_for),
        expected("eager", ()),
        expected("plan", picked),
        expected("heuristic", baseline.buckets),
        expected("floor", everything),
        bound / sum(calls.values()),
        _curve(problem, sets, chosen),
        sum(calls.values()),
        method,
        tuple(notes),
    )


def _how(bucket: Bucket) -> How:
    return "compiled" if bucket.compiled else "plain"


def _plan(buckets: Sequence[Bucket], made_for: Mapping[str, str]) -> BucketPlan | None:
    plain, compiled = (tuple(b.shape for b in buckets if b.compiled == kind) for kind in (False, True))
    return BucketPlan(plain, compiled, dict(made_for)) if buckets else None


def _checked(calls: Calls, *limits: float | None) -> dict[Shape, int]:
    """The calls that happen, sorted, or an error."""
    for name, limit in zip(("max_graphs", "max_bytes", "max_seconds"), limits, strict=True):
        if limit is not None and not limit > 0:
            raise ValueError(f"{name} must be above 0 or left out, got {limit}")
    if any(n < 0 or min(shape) < 1 for shape, n in calls.items()):
        raise ValueError("calls must map shapes (batch, frames) of at least 1 to counts that are not negative")
    happen = {Shape(*shape): int(n) for shape, n in sorted(calls.items()) if n}
    if not happen:
        raise ValueError("there are no calls to plan for")
    return happen


def _outside(profile: Profile, ways: Sequence[tuple[Shape, How]]) -> list[str]:
    """Which of these times are extrapolated."""
    found: list[str] = []
    for kind in dict.fromkeys(how for _, how in ways):
        shapes = [s for s, how in ways if how == kind]
        found += [f"{s} {kind}" for s, out in zip(shapes, profile.at(shapes, kind)[1].tolist(), strict=True) if out]
    return found


def _curve(p: Problem, sets: Sequence[Bools], chosen: Bools) -> tuple[CurvePoint, ...]:
    """The points of the curve; the plan takes the place of sets of its size or more that are no better."""
    graphs, sets, total = [*range(len(sets))], list(sets), p.total(chosen)
    n = int(chosen.sum())
    if n > graphs[-1]:
        graphs, sets = [*graphs, n], [*sets, chosen]
    sets = [chosen if k >= n and p.total(one) > total * (1 + SAME) else one for k, one in zip(graphs, sets, strict=True)]
    stacked = need("numpy").stack(sets)
    columns = (p.totals(stacked) / p.weight.sum(), p.pool(stacked), stacked @ p.seconds)
    rows = zip(graphs, sets, *(column.tolist() for column in columns), strict=True)
    return tuple(CurvePoint(k, ms, round(pool), seconds, p.picked(one)) for k, one, ms, pool, seconds in rows)
