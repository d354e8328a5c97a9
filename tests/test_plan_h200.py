"""What the planner promises, held by the profile of an H200 that comes with the project: on the shipped traces, and on a shared one."""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path

import pytest

from omnigraph.planner import plan_buckets
from omnigraph.profile import Profile
from omnigraph.serving import simulate
from omnigraph.shapes import BucketPlan, Shape
from omnigraph.trace import Trace

pytest.importorskip("scipy")

ROOT = Path(__file__).parents[1]
H200 = ROOT / "data" / "profiles" / "h200_code2wav_bf16.json"
AZURE = ROOT.parent / "shared" / "data" / "AzureLLMInferenceTrace_conv.csv"
STREAMED, OFFLINE = (25, 25), (300, 25)  # chunk size, left context
HEURISTIC = BucketPlan.from_chunking(*STREAMED)
BATCHED = BucketPlan.from_chunking(*STREAMED, [1, 4, 8])
LOADS = {"assistant": 16, "utterances": 12, "azure": 0.8}  # at which the heuristic's decoder is busy and not saturated


@pytest.fixture(scope="module")
def profile() -> Profile:
    return Profile.load(H200)


@pytest.fixture(scope="module", params=list(LOADS))
def trace(request: pytest.FixtureRequest) -> Trace:
    if request.param != "azure":
        return Trace.load(ROOT / "data" / "traces" / f"{request.param}.csv")
    if not AZURE.exists():
        pytest.skip("the Azure trace is not here: ../shared/data is missing; the shipped traces carry the same checks")
    return Trace.load(AZURE)


def test_streamed_three_graphs_do_as_well_as_the_heuristics_eleven(trace: Trace, profile: Profile) -> None:
    report = plan_buckets(trace.calls(*STREAMED), profile, max_graphs=3)
    assert (report.chosen.graphs, report.heuristic.graphs) == (3, 11)
    assert report.chosen.ms <= report.heuristic.ms < report.eager.ms
    assert (report.gap, report.notes) == (0, ())


@pytest.mark.parametrize("heuristic", [HEURISTIC, BucketPlan.from_chunking(0, 0)], ids=len)
def test_offline_as_many_graphs_leave_a_third_of_the_heuristics_excess(trace: Trace, profile: Profile, heuristic: BucketPlan) -> None:
    report = plan_buckets(trace.calls(*OFFLINE), profile, max_graphs=len(heuristic), baseline=heuristic)
    assert report.chosen.ms - report.floor.ms <= (report.heuristic.ms - report.floor.ms) / 3
    assert (report.gap, report.notes) == (0, ())


@pytest.mark.parametrize(("chunks", "fps"), [(STREAMED, 25.0), (OFFLINE, math.inf)], ids=["streamed", "offline"])
def test_a_quarter_of_the_heuristics_memory_is_enough(trace: Trace, profile: Profile, chunks: tuple[int, int], fps: float) -> None:
    load = LOADS.get(trace.name, LOADS["azure"])
    sizes = {"chunk_size": chunks[0], "left_context_size": chunks[1], "frames_per_second": fps}
    served = simulate(trace.scale(load), profile, BATCHED, max_batch=8, **sizes)
    assert served.utilisation > 0.25
    assert served.summary()["mean_batch"] > 1.05
    for calls in (trace.calls(*chunks), served.calls):
        quarter = profile.pool_bytes(BATCHED.buckets) / 4
        report = plan_buckets(calls, profile, len(BATCHED), quarter, baseline=BATCHED, search_seconds=1)
        assert report.chosen.pool_bytes <= quarter
        assert report.chosen.ms <= report.heuristic.ms


def test_an_hour_of_streams_is_planned_in_two_seconds_and_ten_thousand_hours_too(profile: Profile) -> None:
    if not AZURE.exists():
        pytest.skip("the Azure trace is not here: ../shared/data is missing")
    calls = Trace.load(AZURE).calls(*STREAMED)
    assert sum(calls.values()) == 622_718
    start = time.perf_counter()
    hour = plan_buckets(calls, profile, max_graphs=3)
    assert time.perf_counter() - start < 2
    start = time.perf_counter()
    long = plan_buckets({shape: 10_000 * n for shape, n in calls.items()}, profile, max_graphs=3)
    assert time.perf_counter() - start < 2, "it is the shapes that take time, not the calls"
    assert long.plan == hour.plan
    assert long.chosen.ms == pytest.approx(hour.chosen.ms)


def test_a_graph_pays_for_short_calls_and_hardly_for_long_ones(profile: Profile) -> None:
    gain = {shape: profile.cost(shape, "eager") / profile.cost(shape, "plain") for shape in (Shape(1, 4), Shape(1, 25), Shape(8, 325))}
    assert gain[Shape(1, 4)] > 3
    assert gain[Shape(1, 25)] > 2
    assert gain[Shape(8, 325)] < 1.1


def test_nothing_a_user_of_the_shipped_traces_sees_is_extrapolated(profile: Profile) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("assistant", "utterances"):
            trace = Trace.load(ROOT / "data" / "traces" / f"{name}.csv")
            for chunks in (STREAMED, OFFLINE):
                assert plan_buckets(trace.calls(*chunks), profile, max_graphs=5).notes == ()
