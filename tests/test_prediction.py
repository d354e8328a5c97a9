"""The tables behind the panel: the same as one call to `route` after the other, and fast enough to follow a slider."""

from __future__ import annotations

import itertools
import random
import time
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnigraph._points import Point
from omnigraph._prediction import SCRATCH, Padding, Prediction, predictor
from omnigraph.driving import Driven, Timing
from omnigraph.figures import predicted_against_measured
from omnigraph.profile import Profile
from omnigraph.shapes import Bucket, BucketPlan, How, Shape, route
from omnigraph.stats import Fallback, Outcome, ReplayStats, outcome

pd = pytest.importorskip("pandas")
np = pytest.importorskip("numpy")

BATCHES, FRAMES = (1, 2, 4), tuple(range(1, 13))


def made_up(rng: random.Random, round_to: int = 3) -> Profile:
    """Any times, eager and replayed, at every shape; many of them equal, so that ties are met."""
    points = []
    for shape in itertools.starmap(Shape, itertools.product((1, 2, 3, 4, 5), FRAMES)):
        points.append(Point(shape, "eager", round(rng.uniform(2, 14), round_to)))
        for how in ("plain", "compiled"):
            ms, seconds = round(rng.uniform(1, 6), round_to), rng.uniform(0.1, 1)
            points.append(Point(shape, how, ms, bytes_alone=rng.randint(10, 90), bytes_marginal=rng.randint(1, 9), seconds=seconds))
    return Profile(tuple(points))


def how(bucket: Bucket) -> How:
    return "compiled" if bucket.compiled else "plain"


def one_by_one(
    calls: dict[Shape, int], profile: Profile, plan: BucketPlan, padding: Padding, by_frames: bool
) -> tuple[Any, dict[str, list[int]], float]:
    """The outcomes as a decoder would count them, what each bucket does, and all milliseconds."""
    stats, ms = ReplayStats(), 0.0
    work = {str(bucket): [0, 0, 0] for bucket in plan.buckets} | {"eager": [0, 0, 0]}
    for shape, n in calls.items():
        taken = route(shape, plan.buckets, None if by_frames else profile.cost, **padding._asdict())
        for _ in range(n):
            stats.record(shape, outcome(taken))
        ms += n * (sum(profile.cost(b.shape, how(b)) for b, _ in taken.parts) if taken.parts else profile.cost(shape, "eager"))
        for bucket, rows in taken.parts:
            asked = rows * shape.frames
            for i, more in enumerate((n, n * asked, n * (bucket.shape.batch * bucket.shape.frames - asked))):
                work[str(bucket)][i] += more
        work["eager"][1] += n * shape.batch * shape.frames * (not taken.parts)
    return stats.to_frame(), work, ms


shapes = st.builds(Shape, st.integers(1, 5), st.sampled_from(FRAMES))


@settings(max_examples=120, deadline=None)
@given(
    calls=st.dictionaries(shapes, st.integers(1, 4), min_size=1, max_size=20),
    plain=st.sets(shapes, min_size=1, max_size=8),
    compiled=st.sets(shapes, max_size=3),
    padding=st.builds(Padding, st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 50),
    round_to=st.integers(0, 3),
    by_frames=st.booleans(),
)
def test_a_prediction_is_what_route_says_call_by_call(
    calls: dict[Shape, int], plain: set[Shape], compiled: set[Shape], padding: Padding, seed: int, round_to: int, by_frames: bool
) -> None:
    profile, plan = made_up(random.Random(seed), round_to), BucketPlan(tuple(plain), tuple(compiled))
    found = predictor(calls, profile, by_frames=by_frames)(plan, padding)
    counted, work, ms = one_by_one(calls, profile, plan, padding, by_frames)
    columns = ["batch", "frames", "kind", "compiled", "bucket", "reason", "calls", "padded_frames"]
    pd.testing.assert_frame_equal(found.calls[columns], counted[columns], check_dtype=False)
    rows = found.work.set_index("bucket")
    assert {name: row.tolist() for name, row in zip(rows.index, rows.to_numpy(), strict=True)} == work
    assert found.summary["ms"] * found.summary["calls"] == pytest.approx(ms)
    assert found.summary["hit_rate"] == pytest.approx(1 - counted["calls"][counted["kind"] == "fallback"].sum() / sum(calls.values()))


@pytest.fixture(scope="module")
def found() -> Prediction:
    calls = {Shape(1, 5): 3, Shape(2, 9): 1}
    return predictor(calls, made_up(random.Random(1)))(BucketPlan((Shape(1, 6), Shape(2, 9))))


def test_costs_add_up_to_the_pool_and_the_warm_up(found: Prediction) -> None:
    profile, buckets = made_up(random.Random(1)), BucketPlan((Shape(1, 6), Shape(2, 9))).buckets
    assert list(found.costs["bucket"]) == ["1x6", "2x9", SCRATCH]
    assert found.costs["mib"].sum() * 2**20 == pytest.approx(profile.pool_bytes(buckets), abs=1)
    assert found.summary["warmup_seconds"] == pytest.approx(profile.warmup_seconds(buckets))


def test_latency_has_every_call_once_for_each_way(found: Prediction) -> None:
    latency = found.latency("mine")
    assert latency.groupby("way", sort=False)["calls"].sum().to_dict() == {"eager": 4, "mine": 4}
    mean = (latency["ms"] * latency["calls"]).groupby(latency["way"]).sum() / 4
    assert mean.to_dict() == pytest.approx({"eager": found.summary["eager_ms"], "mine": found.summary["ms"]})


def test_what_was_measured_stands_beside_what_was_predicted(found: Prediction) -> None:
    times = (1.5, 2.0, 2.5)
    outcomes = (Outcome("fallback", reason=Fallback.NO_BUCKET), Outcome("exact", (Bucket(Shape(2, 9)),)))
    timings = tuple(Timing(shape, o, 3, times, times) for shape, o in zip((Shape(1, 7), Shape(2, 9)), outcomes, strict=True))
    both = found.against(Driven(timings, "a CPU", "float32", "cpu").to_frame())
    predicted = found.calls["ms"][found.calls["batch"] == 2].item()
    assert both[["shape", "kind", "calls", "predicted_ms", "measured_ms"]].to_numpy().tolist() == [["2x9", "exact", 3, predicted, 2.0]]
    assert "2x9" in predicted_against_measured(both, "made up").data[1].customdata[0]


def test_without_a_plan_all_is_eager() -> None:
    found = predictor({Shape(1, 5): 3}, made_up(random.Random(1)))(None)
    assert found.calls[["kind", "reason", "calls"]].to_numpy().tolist() == [["fallback", "disabled", 3]]
    assert found.summary["ms"] == found.summary["eager_ms"]
    assert found.summary["hit_rate"] == found.summary["pool_bytes"] == found.summary["graphs"] == 0
    assert found.work.to_numpy().tolist() == [["eager", 0, 15, 0]]


@pytest.mark.parametrize("calls", [{}, {Shape(1, 5): 0}])
def test_nothing_to_predict_is_an_error(calls: dict[Shape, int]) -> None:
    with pytest.raises(ValueError, match="no calls to predict"):
        predictor(calls, made_up(random.Random(1)))


def test_compiled_buckets_need_compiled_times() -> None:
    eager_and_plain = Profile(tuple(p for p in made_up(random.Random(1)).points if p.how != "compiled"))
    with pytest.raises(ValueError, match="no compiled times"):
        predictor({Shape(1, 5): 1}, eager_and_plain)(BucketPlan((), (Shape(1, 5),)))


def test_a_change_of_plan_for_600_000_calls_takes_under_100_ms() -> None:
    points = [
        Point(Shape(b, f), how, ms + 0.1 * b * f, 0, 1, 1000 * b * f, 100, 0.1)
        for b, f in itertools.product((1, 2, 4, 8), (1, 25, 50, 97, 325))
        for how, ms in (("eager", 12.0), ("plain", 2.0))
    ]
    calls = {Shape(b, f): 231 for b, f in itertools.product(range(1, 9), range(1, 326))}  # 2,600 shapes
    assert sum(calls.values()) > 600_000
    with warnings.catch_warnings(action="ignore"):
        predict = predictor(calls, Profile(tuple(points)))
    predict(None)
    took = []
    for plan in (BucketPlan.from_chunking(25, 72, [1, 4, 8]), BucketPlan.grid([1, 2, 4, 8], range(5, 101, 5)), BucketPlan.grid([1], [50])):
        for padding in (Padding(), Padding(False, False), Padding(split=False)):
            start = time.process_time()
            predict(plan, padding)
            took.append(time.process_time() - start)
    assert max(took) < 0.1, took
