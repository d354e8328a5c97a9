"""Wherever a plan has compiled buckets, their own measured times are what is counted: in plans, simulations and packing."""

from __future__ import annotations

from pathlib import Path

import pytest

import omnigraph as og
from omnigraph.packing import packer
from omnigraph.serving import call_ms
from omnigraph.shapes import Bucket, Shape

FILE = Path(__file__).parents[1] / "data" / "profiles" / "h200_code2wav_bf16.json"
SHORT, LONG = Shape(1, 25), Shape(1, 50)
CALLS = {SHORT: 3, LONG: 7}


@pytest.fixture(scope="module")
def profile() -> og.Profile:
    return og.Profile.load(FILE)


def measured(profile: og.Profile, shape: Shape, how: str) -> float:
    """As it stands in the file: the profile's own look-up is what is tested."""
    [point] = [p for p in profile.points if p.shape == shape and p.how == how]
    return point.ms


def test_the_profile_has_them_and_they_are_faster(profile: og.Profile) -> None:
    for shape in CALLS:
        assert profile.cost(shape, "compiled") == measured(profile, shape, "compiled") < measured(profile, shape, "plain")
        assert profile.seconds(shape, compiled=True) > 10 > profile.seconds(Shape(1, 40))


def test_a_plan_expects_their_times_and_their_warm_up(profile: og.Profile) -> None:
    plain, fast = (og.plan_buckets(CALLS, profile, compiled=compiled) for compiled in (None, list(CALLS)))
    assert fast.plan is not None and fast.plan.compiled == (SHORT, LONG) and not fast.plan.plain
    expected = (3 * measured(profile, SHORT, "compiled") + 7 * measured(profile, LONG, "compiled")) / 10
    assert fast.chosen.ms == pytest.approx(expected) and fast.chosen.ms < plain.chosen.ms
    seconds = [point.seconds for point in profile.points if point.how == "compiled" and point.shape in CALLS]
    assert fast.chosen.warmup_seconds == pytest.approx(sum(seconds))


def test_a_plan_with_both_takes_the_compiled_one_for_its_calls(profile: og.Profile) -> None:
    route = og.route(LONG, [Bucket(LONG), Bucket(LONG, True)], profile.cost)
    assert [part.bucket for part in route.parts] == [Bucket(LONG, True)]
    assert call_ms(route, profile.cost) == measured(profile, LONG, "compiled")


@pytest.mark.parametrize("how", ["plain", "compiled"])
def test_a_simulation_takes_them(profile: og.Profile, how: str) -> None:
    trace = og.Trace.synthesise(requests=1, rate=1.0, mean_frames=50.0, sigma=0.0, max_frames=50)
    assert trace.frames.tolist() == [50]
    plan = og.BucketPlan((SHORT, LONG)) if how == "plain" else og.BucketPlan((), (SHORT, LONG))
    served = og.simulate(trace, profile, plan, max_batch=1)
    assert served.ms.tolist() == [measured(profile, SHORT, how), measured(profile, LONG, how)]


def test_packing_prices_them(profile: og.Profile) -> None:
    """Two windows of 25 and 32 frames: a call of two rows is cheaper than two plain calls, and dearer than two compiled ones."""
    pair = Shape(2, 32)
    together = measured(profile, pair, "plain")
    apart = {how: measured(profile, SHORT, how) + measured(profile, LONG, how) for how in ("plain", "compiled")}
    assert apart["compiled"] < together < apart["plain"]
    assert together < 2 * measured(profile, LONG, "compiled"), "else the pair would be split"
    for how, expected in (("plain", [Bucket(pair)]), ("compiled", [Bucket(LONG, True), Bucket(SHORT, True)])):
        calls = packer([Bucket(SHORT, how == "compiled"), Bucket(LONG, how == "compiled"), Bucket(pair)], profile.cost)([25, 32], None)
        assert [part.bucket for call in calls for part in call.route.parts] == expected
