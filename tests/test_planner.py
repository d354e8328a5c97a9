from __future__ import annotations

import itertools
import random
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnigraph._candidates import candidates, problem_of
from omnigraph._line import Line, is_line
from omnigraph._points import Point
from omnigraph._relax import Relaxation
from omnigraph._report import CurvePoint, Expectation, PlanReport, Routes
from omnigraph._search import Problem, search
from omnigraph.planner import plan_buckets
from omnigraph.profile import Profile
from omnigraph.shapes import Bucket, BucketPlan, Cost, How, Shape, route
from omnigraph.trace import Trace

ROOT = Path(__file__).parents[1]
AZURE = ROOT.parent / "shared" / "data" / "AzureLLMInferenceTrace_conv.csv"


def launch_bound(batches: Iterable[int] = (1, 2, 4, 8), compiled: Iterable[Shape] = ()) -> Profile:
    """Times like those of Code2Wav on an H200: eager is bound by launches up to some 100 frames, a replay saves less and less."""
    points = []
    for b, f in itertools.product(batches, (1, 2, 4, 8, 12, 16, 20, 25, 32, 40, 50, 64, 80, 97, 128, 160, 200, 256, 288, 325)):
        area, shape = b * f, Shape(b, f)
        replay = 2.5 + 0.07 * area
        points.append(Point(shape, "eager", max(11.8, 2.0 + 1.02 * replay), 0.05, 20))
        points.append(Point(shape, "plain", replay, 0.02, 20, 8_000_000 + 1_300_000 * area, 2_000_000 + 20_000 * area, 0.05))
        if shape in set(compiled):
            points.append(Point(shape, "compiled", 0.65 * replay, 0.02, 20, 7_000_000 + 1_000_000 * area, 2_000_000 + 20_000 * area, 19.0))
    return Profile(tuple(points), {"model": "Code2Wav", "dtype": "bfloat16", "device": "made up"})


def how(bucket: Bucket) -> How:
    return "compiled" if bucket.compiled else "plain"


def by_route(calls: dict[Shape, int], buckets: Iterable[Bucket], cost: Cost, **pad: bool) -> float:
    """Mean milliseconds of a call, one call to `route` after the other: what the planner's predictions must be."""
    total = 0.0
    for shape, n in calls.items():
        taken = route(shape, tuple(buckets), cost, **pad)
        total += n * (sum(cost(b.shape, how(b)) for b, _ in taken.parts) if taken.parts else cost(shape, "eager"))
    return total / sum(calls.values())


def made_up(rng: random.Random, batches: list[int], frames: list[int], *, smooth: bool) -> Profile:
    """Every shape measured; times that grow with the shape, or (not `smooth`) any times."""
    points = []
    for b, f in itertools.product(batches, frames):
        replay = (1 + 0.3 * b * f) if smooth else rng.uniform(1, 12)
        eager = max(6.0, 2 + 0.32 * b * f) if smooth else rng.uniform(3, 14)
        alone, own = rng.randint(10, 40) + b * f, rng.randint(1, 9)
        points.append(Point(Shape(b, f), "eager", eager))
        points.append(Point(Shape(b, f), "plain", replay, bytes_alone=alone, bytes_marginal=own, seconds=rng.uniform(0.1, 1)))
        if rng.random() < 0.2:
            points.append(Point(Shape(b, f), "compiled", replay * rng.uniform(0.4, 1.1), 0, 1, alone, own, rng.uniform(1, 3)))
    return Profile(tuple(points))


class Known(dict[tuple[Shape, How], float]):
    """A cost function from a table."""

    def __call__(self, shape: Shape, how: How) -> float:
        return self[shape, how]


def subsets(buckets: list[Bucket], most: float) -> Iterable[tuple[Bucket, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(buckets, k) for k in range(min(int(most), len(buckets)) + 1))


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("seeds", [range(i, i + 30) for i in range(0, 150, 30)], ids=str)
def test_one_batch_size_is_planned_as_well_as_by_trying_everything(seeds: range, smooth: bool) -> None:
    for seed in seeds:
        one_batch_size(random.Random(seed), smooth)


def one_batch_size(rng: random.Random, smooth: bool) -> None:
    frames = sorted(rng.sample(range(1, 40), 6))
    profile = made_up(rng, [batch := rng.choice([1, 3])], frames, smooth=smooth)
    calls = {Shape(batch, f): rng.randint(1, 99) for f in rng.sample(frames, rng.randint(1, 5))}
    pad = {"pad_frames": rng.random() < 0.8, "pad_batch": True, "split": rng.random() < 0.5}
    most = rng.randint(1, 4)
    report = plan_buckets(calls, profile, max_graphs=most, compiled=list(profile.compiled) or None, **pad)
    everything = [Bucket(s) for s in profile.plain] + [Bucket(s, True) for s in profile.compiled]
    best = min(by_route(calls, some, profile.cost, **pad) for some in subsets(everything, most))
    assert report.chosen.ms == pytest.approx(best, rel=1e-9)
    assert report.gap == 0
    assert len(report.plan or ()) <= most


def limited(rng: random.Random, profile: Profile, buckets: list[Bucket]) -> dict[str, float | None]:
    return {
        "max_graphs": rng.randint(1, 5) if rng.random() < 0.5 else None,
        "max_bytes": profile.pool_bytes(buckets) * rng.uniform(0.2, 0.8) if rng.random() < 0.7 else None,
        "max_seconds": profile.warmup_seconds(buckets) * rng.uniform(0.1, 0.7) if rng.random() < 0.4 else None,
    }


def fits(profile: Profile, some: tuple[Bucket, ...], limits: dict[str, Any]) -> bool:
    return (
        len(some) <= (limits["max_graphs"] or 99)
        and profile.pool_bytes(some) <= (limits["max_bytes"] or 1e99) * (1 + 1e-9)
        and profile.warmup_seconds(some) <= (limits["max_seconds"] or 1e99) * (1 + 1e-9)
    )


@pytest.mark.parametrize("seeds", [range(i, i + 20) for i in range(0, 60, 20)], ids=str)
def test_plans_within_limits_are_within_their_gap_of_the_best(seeds: range) -> None:
    """Batches and lengths, limits on graphs, bytes and seconds, all ways of padding: against every subset of the candidates."""
    for seed in seeds:
        within_limits(random.Random(seed))


def within_limits(rng: random.Random) -> None:
    one = rng.random() < 0.3
    batches, frames = ([2] if one else [1, 2, 4]), sorted(rng.sample(range(1, 30), 5 if one else 2))
    profile = made_up(rng, batches, frames, smooth=rng.random() < 0.6)
    everything = [Bucket(s) for s in profile.plain]
    batch_sizes = [2] if one else [1, 2, 3, 4]
    shapes = {Shape(rng.choice(batch_sizes), rng.choice(frames)) for _ in range(5)} | {Shape(batch_sizes[-1], frames[-1])}
    calls = {s: rng.randint(1, 99) for s in sorted(shapes)}
    pad = {"pad_frames": rng.random() < 0.8, "pad_batch": rng.random() < 0.8, "split": rng.random() < 0.8}
    limits = limited(rng, profile, everything)
    report = plan_buckets(calls, profile, **limits, **pad)
    considered = candidates(calls, profile, None)[0]
    p = replace(problem_of(calls, profile, considered), **pad)
    sets = np.array([s for s in itertools.product([False, True], repeat=len(considered)) if fits(profile, p.picked(np.array(s)), limits)])
    best = by_route(calls, p.picked(sets[p.totals(sets).argmin()]), profile.cost, **pad)
    picked = report.plan.buckets if report.plan else ()
    assert fits(profile, picked, limits)
    assert report.bound <= best * (1 + 1e-7)
    assert best <= report.chosen.ms * (1 + 1e-9)
    assert report.chosen.ms <= best * (1 + report.gap + 1e-6)
    assert report.gap < 1e-6, "so small a problem is solved to the end"


def problem(seed: int, lines: bool = False) -> Problem:
    """A problem of up to 12 candidates with limits."""
    rng = random.Random(seed)
    batches, frames = ([2], sorted(rng.sample(range(1, 40), 9))) if lines else ([1, 2, 4], sorted(rng.sample(range(1, 40), 4)))
    profile = made_up(rng, batches, frames, smooth=rng.random() < 0.5)
    shapes = sorted({Shape(rng.choice(batches if lines else [1, 2, 3, 4]), rng.choice(frames)) for _ in range(8)})
    buckets = sorted((Bucket(s) for s in profile.plain), key=lambda b: (b.shape.frames, b.shape.batch))
    p = problem_of({s: rng.randint(1, 99) for s in shapes}, profile, buckets)
    limits = {name: limit for name, limit in limited(rng, profile, buckets).items() if limit is not None}
    flags = {name: rng.random() < 0.8 for name in ("pad_frames", "pad_batch", "split")}
    return Problem(p.shapes, p.weight, p.eager, p.buckets, p.ms, p.marginal, p.extra, p.seconds, **limits, **flags)


def best_total(p: Problem) -> float:
    sets = np.array(list(itertools.product([False, True], repeat=len(p.buckets))))
    return float(p.totals(sets[p.fits(sets)]).min())


@pytest.mark.parametrize("seeds", [range(i, i + 50) for i in range(0, 200, 50)], ids=str)
def test_many_sets_at_once_cost_what_route_says(seeds: range) -> None:
    for seed in seeds:
        p = problem(seed)
        known: dict[tuple[Shape, How], float] = {(b.shape, how(b)): ms for b, ms in zip(p.buckets, p.ms, strict=True)} | {
            (s, "eager"): ms for s, ms in zip(p.shapes, p.eager, strict=True)
        }
        sets = np.random.default_rng(seed).random((4, len(p.buckets))) < 0.4
        calls = dict(zip(p.shapes, p.weight.astype(int).tolist(), strict=True))
        flags = {"pad_frames": p.pad_frames, "pad_batch": p.pad_batch, "split": p.split}
        for total, one in zip(p.totals(sets), sets, strict=True):
            assert total == pytest.approx(sum(calls.values()) * by_route(calls, p.picked(one), Known(known), **flags))


@pytest.mark.parametrize("seeds", [range(i, i + 20) for i in range(0, 60, 20)], ids=str)
def test_bounds_hold_and_sets_fit(seeds: range) -> None:
    for seed in seeds:
        p = problem(seed)
        best, found = best_total(p), search(p, p.none, time.perf_counter() + 5)
        assert p.fits(found[None])[0]
        assert p.total(found) >= best * (1 - 1e-9)
        relaxed, bound = Relaxation(p).solve(p.total(found), False, time.perf_counter() + 5)
        assert relaxed is None
        assert bound <= best * (1 + 1e-7)


@pytest.mark.parametrize("seeds", [range(i, i + 20) for i in range(0, 60, 20)], ids=str)
def test_priced_limits_on_a_line_bound_the_best_total(seeds: range) -> None:
    for seed in seeds:
        p = problem(seed, lines=True)
        assert is_line(p)
        best, (chosen, bound) = best_total(p), Line(p).priced()
        assert p.fits(chosen[None])[0]
        assert bound <= best * (1 + 1e-9) <= p.total(chosen) * (1 + 2e-9)


@settings(max_examples=50)
@given(st.data())
def test_routes_are_those_of_route(data: st.DataObject) -> None:
    shapes = st.builds(Shape, st.integers(1, 4), st.integers(1, 6))
    buckets = data.draw(st.lists(st.builds(Bucket, shapes, st.booleans()), max_size=8, unique=True))
    times = data.draw(st.dictionaries(st.tuples(shapes, st.sampled_from(["eager", "plain", "compiled"])), st.sampled_from([1.0, 2.0, 3.0])))
    pad = {name: data.draw(st.booleans()) for name in ("pad_frames", "pad_batch", "split")}

    def cost(shape: Shape, how: How) -> float:
        return times.get((shape, how), 2.5)

    routes = Routes(buckets, cost, **pad)
    for b, f in itertools.product(range(1, 6), range(1, 8)):
        assert routes.of(Shape(b, f)) == route(Shape(b, f), buckets, cost, **pad)


def test_the_report_predicts_what_routing_every_call_gives() -> None:
    profile = launch_bound()
    calls = {Shape(1, 25): 500, Shape(1, 41): 80, Shape(3, 50): 200, Shape(8, 50): 20, Shape(8, 325): 5}
    report = plan_buckets(calls, profile, max_graphs=3, baseline=BucketPlan.grid([1, 4], [50]))
    assert report.plan is not None
    for row, buckets in (
        (report.chosen, report.plan.buckets),
        (report.heuristic, BucketPlan.grid([1, 4], [50]).buckets),
        (report.eager, ()),
    ):
        assert row.ms == pytest.approx(by_route(calls, buckets, profile.cost))
        taken = {s: route(s, buckets, profile.cost) for s in calls}
        assert row.hit_rate == pytest.approx(sum(n for s, n in calls.items() if taken[s].parts) / 805)
        padding = sum(n * taken[s].padding for s, n in calls.items())
        assert row.padded_share == pytest.approx(padding / (padding + sum(n * s.batch * s.frames for s, n in calls.items())))
    assert report.eager.p50 == profile.cost(Shape(1, 25), "eager")
    assert report.eager.p99 == profile.cost(Shape(8, 50), "eager")
    assert report.chosen.pool_bytes == profile.pool_bytes(report.plan.buckets)
    assert report.plan.made_for == profile.made_for
    assert report.floor.ms <= report.bound <= report.chosen.ms <= report.heuristic.ms <= report.eager.ms


def test_compiled_buckets_only_where_they_are_allowed_and_pay() -> None:
    profile = launch_bound([1], compiled=[Shape(1, 25), Shape(1, 50)])
    calls = {Shape(1, 25): 9000, Shape(1, 30): 10, Shape(1, 50): 9000, Shape(1, 200): 50}
    assert plan_buckets(calls, profile).plan.compiled == ()
    assert plan_buckets(calls, profile, compiled=[(1, 25)], max_graphs=3).plan.compiled == (Shape(1, 25),)
    everywhere = plan_buckets(calls, profile, compiled="all").plan
    assert everywhere is not None
    assert everywhere.compiled == (Shape(1, 25), Shape(1, 30), Shape(1, 50)), "1x30 lies between the compiled ones, 1x200 beyond them"
    assert everywhere.plain == (Shape(1, 200),)
    brief = plan_buckets(calls, profile, compiled="all", max_seconds=20)
    assert brief.plan is not None
    assert len(brief.plan.compiled) == 1
    with pytest.raises(ValueError, match="compiled buckets need a profile with compiled times"):
        plan_buckets(calls, launch_bound([1]), compiled="all")


def test_a_measured_length_that_is_faster_than_the_called_one_is_a_candidate() -> None:
    """Kernels are often faster at a multiple of their tile."""
    points = [Point(Shape(1, f), h, ms) for f, e, r in ((50, 9, 5), (63, 9, 8), (64, 9, 6)) for h, ms in (("eager", e), ("plain", r))]
    report = plan_buckets({Shape(1, 50): 10, Shape(1, 63): 10}, Profile(tuple(points)), max_graphs=2)
    assert report.plan == BucketPlan((Shape(1, 50), Shape(1, 64)))
    assert report.floor.ms == 5.5


def test_graphs_that_do_not_pay() -> None:
    points = [Point(Shape(1, f), h, ms, seconds=1.0) for f in (10, 20) for h, ms in (("eager", 5.0), ("plain", 6.0))]
    report = plan_buckets({Shape(1, 10): 7}, Profile(tuple(points)))
    assert report.plan is None
    assert report.verdict.startswith("Graphs don't pay here")
    assert report.payback is None
    assert report.knee == 0
    assert report.chosen.ms == report.eager.ms == report.floor.ms == report.bound
    assert "Plan: none." in str(report)


def test_verdicts() -> None:
    def verdict(replay: float, seconds: float, **limits: float) -> str:
        points = (Point(Shape(1, 10), "eager", 10.0), Point(Shape(1, 10), "plain", replay, 0, 5, 100, 10, seconds))
        return plan_buckets({Shape(1, 10): 100}, Profile(points), **limits).verdict

    assert (
        verdict(5, 0.1)
        == "Graphs pay: 1 graph takes 5 ms a call where eager takes 10 (2.00 times as fast); the warm-up of 0.1 s pays back after 20 calls."
    )
    assert verdict(9.9, 0.1).startswith("Graphs hardly pay here")
    assert "pays back after 200 calls; here are 100." in verdict(5, 1.0)
    assert verdict(5, 1.0, max_bytes=50) == "No graph fits the limits: raise them, or decode eagerly."


def test_the_curve_and_its_knee() -> None:
    row = Expectation("", 0, 10.0, 10, 10, 10, 0, 0, 0, 0)
    curve = tuple(CurvePoint(k, ms, 0, 0.0, ()) for k, ms in enumerate((10.0, 6.0, 5.8, 5.6, 5.4, 5.3)))
    assert PlanReport(None, row, row, row, row, 10.0, curve, 1, "").knee == 1
    report = plan_buckets({Shape(1, f): 10 for f in range(1, 51)}, launch_bound([1]), max_graphs=4)
    saved = report.curve_frame().saved_ms.tolist()[1:]
    assert (np.diff(saved) < 1e-9).all(), "each further graph brings less"
    assert report.curve[4].ms == pytest.approx(report.chosen.ms)
    assert report.curve[0].ms == pytest.approx(report.eager.ms)
    assert report.curve[-1].ms == pytest.approx(report.floor.ms)
    assert 1 < report.knee < 20


def test_extrapolation_is_told() -> None:
    with pytest.warns(UserWarning, match="outside the measured shapes"):
        report = plan_buckets({Shape(1, 25): 5, Shape(1, 400): 5}, launch_bound([1]))
    assert report.notes == ("2 times are extrapolated beyond what was measured: 1x400 eager, 1x400 plain",)
    assert str(report).endswith(report.notes[0])
    assert plan_buckets({Shape(1, 25): 5}, launch_bound([1])).notes == ()


@pytest.mark.parametrize(
    ("calls", "limits", "message"),
    [
        ({}, {}, "no calls"),
        ({Shape(1, 5): 0}, {}, "no calls"),
        ({Shape(1, 0): 3}, {}, "at least 1"),
        ({Shape(1, 5): -3}, {}, "not negative"),
        ({Shape(1, 5): 3}, {"max_graphs": 0}, "max_graphs must be above 0"),
        ({Shape(1, 5): 3}, {"max_bytes": -1}, "max_bytes must be above 0"),
        ({Shape(1, 5): 3}, {"max_seconds": float("nan")}, "max_seconds must be above 0"),
    ],
)
def test_bad_input(calls: dict[Shape, int], limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_buckets(calls, launch_bound([1]), **limits)


def test_a_profile_without_graphs() -> None:
    with pytest.raises(ValueError, match="no replay times"):
        plan_buckets({Shape(1, 5): 3}, Profile((Point(Shape(1, 5), "eager", 3.0),)))


def test_the_printed_report() -> None:
    report = plan_buckets({Shape(1, 25): 900, Shape(1, 41): 100}, launch_bound([1]), max_graphs=1)
    assert str(report).splitlines() == [
        "           graphs  ms/call     p50     p95     p99    hits  padding  pool MiB  warm-up s",
        "eager           0   11.800  11.800  11.800  11.800    0.0%     0.0%       0.0       0.00",
        "plan            1    5.005   4.250  11.800  11.800   90.0%     0.0%      38.6       0.05",
        "heuristic      11    4.425   4.250   6.000   6.000  100.0%     3.3%     440.8       0.55",
        "floor           2    4.362   4.250   5.370   5.370  100.0%     0.0%      60.8       0.10",
        "",
        "Graphs pay: 1 graph takes 5 ms a call where eager takes 11.8 (2.36 times as fast); the warm-up of 0.05 s pays back after 8 calls.",
        "Plan: 1x25.",
        "Optimal (dynamic programming), 14.74% over the floor; the knee is at 1 graph.",
    ]
    assert report.to_frame().index.tolist() == ["eager", "plan", "heuristic", "floor"]


def test_thousands_of_lengths_are_thinned_and_that_is_told() -> None:
    calls = {Shape(1, f): 1 + 5000 // f for f in range(1, 3001)}
    points = [Point(Shape(1, f), h, a + b * f) for f in (1, 500, 3000) for h, a, b in (("eager", 12, 0.07), ("plain", 2, 0.07))]
    start = time.perf_counter()
    report = plan_buckets(calls, Profile(tuple(points)), max_graphs=20)
    assert time.perf_counter() - start < 10
    assert report.notes == ("3000 lengths were thinned to 600 candidates: the gap is against plans of these",)
    assert report.over_floor < 0.5
    many = {Shape(b, f): 10 for b in range(1, 17) for f in range(1, 61)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = plan_buckets(many, launch_bound(), max_graphs=6, search_seconds=1)
    assert report.notes[0] == "60 lengths were thinned to 25 candidates: the gap is against plans of these"
    assert report.floor.ms <= report.bound <= report.chosen.ms < report.eager.ms


@pytest.fixture(scope="module")
def azure() -> Trace:
    if not AZURE.exists():
        pytest.skip("the Azure trace is not here: ../shared/data is missing")
    return Trace.load(AZURE)


def test_three_graphs_do_as_well_as_the_heuristics_eleven(azure: Trace) -> None:
    profile = launch_bound([1])
    calls = azure.calls(chunk_size=25, left_context_size=25)
    assert sum(calls.values()) == 622_718
    start = time.perf_counter()
    report = plan_buckets(calls, profile, max_graphs=3)
    assert time.perf_counter() - start < 2
    assert len(report.plan or ()) == 3
    assert report.heuristic.graphs == 11
    assert report.chosen.ms <= report.heuristic.ms
    assert report.gap == 0


def test_offline_as_many_graphs_leave_a_third_of_the_heuristics_excess(azure: Trace) -> None:
    profile = launch_bound([1])
    calls = azure.calls(chunk_size=300, left_context_size=25)
    heuristic = BucketPlan.from_chunking(0, 0)
    start = time.perf_counter()
    report = plan_buckets(calls, profile, max_graphs=len(heuristic), baseline=heuristic)
    assert time.perf_counter() - start < 2
    assert report.chosen.ms - report.floor.ms <= (report.heuristic.ms - report.floor.ms) / 3


def test_a_quarter_of_the_heuristics_memory_is_enough(azure: Trace) -> None:
    profile = launch_bound()
    heuristic = BucketPlan.from_chunking(25, 25, [1, 4, 8])
    calls = azure.calls(chunk_size=25, left_context_size=25)
    for mixed in (calls, {Shape(b, s.frames): -(-n // 2**b) for s, n in calls.items() for b in range(1, 9)}):
        report = plan_buckets(mixed, profile, max_bytes=profile.pool_bytes(heuristic.buckets) / 4, baseline=heuristic, search_seconds=4)
        assert report.chosen.pool_bytes <= report.heuristic.pool_bytes / 4
        assert report.chosen.ms <= report.heuristic.ms
