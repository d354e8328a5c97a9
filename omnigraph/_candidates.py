"""Which buckets are worth considering for a histogram of calls, and the optimisation problem that they make."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from omnigraph._line import Line
from omnigraph._needs import need
from omnigraph._search import Problem
from omnigraph.profile import Profile
from omnigraph.shapes import Bucket, Calls, Shape

MOST_ON_A_LINE, MOST = 600, 400  # candidates for one batch size, and for several


def candidates(
    calls: Calls, profile: Profile, compiled: Literal["all"] | Iterable[Sequence[int]] | None
) -> tuple[list[Bucket], list[Bucket], list[str]]:
    """The buckets to search among, all that could be worth it, and notes on what was left out between the two.

    A length that is not called holds the same calls as the longest called one below it, so it is worth it only where it was
    measured to be faster than that.
    """
    if not profile.plain:
        raise ValueError("the profile has no replay times to plan with: measure it with graphs")
    if compiled is not None and not profile.compiled:
        raise ValueError("compiled buckets need a profile with compiled times: measure it with compiled=[...]")
    np, notes = need("numpy"), list[str]()
    work: dict[int, float] = {}
    for (shape, n), ms in zip(calls.items(), profile.costs(list(calls), "eager").tolist(), strict=True):
        work[shape.frames] = work.get(shape.frames, 0.0) + n * ms
    lengths, called = sorted(work), sorted({s.batch for s in calls})
    batches = sorted({*called, *(s.batch for s in profile.plain if s.batch <= called[-1])}) if len(called) > 1 else called
    faster = [
        s
        for s, point in profile.plain.items()
        if s.batch in batches and s.frames >= lengths[0]
        if point.ms < profile.cost(Shape(s.batch, lengths[bisect_right(lengths, s.frames) - 1]), "plain")
    ]
    allowed = [] if compiled in (None, "all") else [Shape(*s) for s in compiled or ()]

    def grid(lengths: Sequence[int]) -> list[Bucket]:
        shapes = [Shape(b, f) for b in batches for f in lengths]
        found = {Bucket(s) for s in [*shapes, *faster]}
        if compiled == "all":
            found |= {Bucket(s, True) for s, out in zip(shapes, profile.at(shapes, "compiled")[1].tolist(), strict=True) if not out}
        found |= {Bucket(s, True) for s in allowed}
        return sorted(found, key=lambda b: (b.shape.frames, b.shape.batch, b.compiled))

    everything = grid(lengths)
    most = MOST_ON_A_LINE if len(batches) == 1 else max(MOST // len(batches), 1)
    if len(lengths) <= most:
        return everything, everything, notes
    step = math.ceil(len(lengths) / MOST_ON_A_LINE)
    some = np.array(lengths[::-step][::-1], dtype=float)
    # of these, the ones that waste least, were there one batch size: again a line
    weight = np.array([work[f] for f in lengths])
    none = np.zeros(len(some))
    ones = tuple(Bucket(Shape(1, int(f))) for f in some)
    shapes = tuple(Shape(1, f) for f in lengths)
    thin = Problem(shapes, weight, np.full(len(lengths), 2.0 * some[-1]), ones, some, none, none, none)
    kept = [b.shape.frames for b in thin.picked(Line(thin).curve(most)[-1])] if len(some) > most else some.astype(int).tolist()
    notes.append(f"{len(lengths)} lengths were thinned to {len(kept)} candidates: the gap is against plans of these")
    return grid(kept), everything, notes


def problem_of(calls: Mapping[Shape, int], profile: Profile, buckets: Sequence[Bucket]) -> Problem:
    """The choice among `buckets` for `calls`, without limits."""
    np, shapes = need("numpy"), list(calls)
    weight, eager = np.array(list(calls.values()), dtype=float), profile.costs(shapes, "eager")
    ms, marginal, seconds = profile.each(buckets, "ms"), profile.each(buckets, "bytes_marginal"), profile.each(buckets, "seconds")
    extra = np.maximum(profile.each(buckets, "bytes_alone") - marginal, 0)
    return Problem(tuple(shapes), weight, eager, tuple(buckets), ms, marginal, extra, seconds)
