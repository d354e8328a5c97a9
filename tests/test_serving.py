"""`simulate` against a slow reading of its rules, against times worked out by hand, and what holds for every run."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnigraph.chunks import schedule
from omnigraph.serving import load_curve, saturates_at, settle, simulate
from omnigraph.shapes import BucketPlan, Shape, route
from omnigraph.trace import Trace


@dataclass
class Linear:
    """A profile whose times are `base + each * batch * frames` milliseconds; a graph saves `saved` of the base."""

    base: float = 12.0
    each: float = 0.5
    saved: float = 9.0

    def cost(self, shape, how):
        return self.base - {"eager": 0.0, "plain": self.saved, "compiled": self.saved + 1}[how] + self.each * shape.batch * shape.frames


def trace_of(*requests):
    arrival, frames = zip(*requests, strict=True)
    return Trace(np.array(arrival, dtype=np.float64), np.array(frames, dtype=np.int64), "test")


def slowly(trace, profile, plan, *, max_batch, chunk, context, ramp, lookahead, rate, playback, upsample, trim, pad_frames, pad_batch):
    """Read the rules of `simulate` one by one."""
    chunks = []
    for r, (arrival, frames) in enumerate(zip(trace.arrival.tolist(), trace.frames.tolist(), strict=True)):
        cut = schedule(frames, chunk_size=chunk, left_context_size=context, upsample=upsample, trim=trim, ramp=ramp, lookahead=lookahead)
        for k, c in enumerate(cut):
            due, offset = arrival + c.last / rate, c.at / upsample / playback
            chunks.append(SimpleNamespace(r=r, k=k, size=c.last - c.first, due=due, offset=offset, ready=None))
    queue, free, calls = sorted(chunks, key=lambda c: (c.due, c.r, c.k)), -math.inf, []
    while queue:
        now = max(free, queue[0].due)
        batch = []
        for c in queue:
            first_of_its_request = not any(o.r == c.r and o.k < c.k and o not in batch for o in queue)
            if c.due <= now and len(batch) < max_batch and first_of_its_request and (pad_frames or c.size == queue[0].size):
                batch.append(c)
        shape = Shape(len(batch), max(c.size for c in batch))
        if plan is None:
            ms = profile.cost(shape, "eager")
        else:
            taken = route(shape, plan.buckets, profile.cost, pad_frames=pad_frames, pad_batch=pad_batch)
            ms = sum(profile.cost(p.bucket.shape, "compiled" if p.bucket.compiled else "plain") for p in taken.parts)
            ms = ms or profile.cost(shape, "eager")
        free = now + ms / 1e3
        for c in batch:
            c.ready = free
            queue.remove(c)
        calls.append((now, ms, shape, sorted((c.r, c.k) for c in batch)))
    requests = []
    for r, arrival in enumerate(trace.arrival.tolist()):
        mine = [c for c in chunks if c.r == r]
        begun, stalls, stalled = mine[0].ready, 0, 0.0
        for c in mine:
            gap = c.ready - (begun + c.offset + stalled)
            if gap > 1e-6:
                stalls, stalled = stalls + 1, stalled + gap
        requests.append((begun - arrival, stalls, stalled))
    return calls, requests


def batches(served):
    place = np.concatenate([np.arange(n) for n in np.bincount(served.request)])
    found = [[] for _ in served.start]
    for call, request, k in zip(served.call.tolist(), served.request.tolist(), place.tolist(), strict=True):
        found[call].append((request, k))
    return [sorted(batch) for batch in found]


requests = st.lists(st.tuples(st.integers(0, 40).map(lambda n: n / 8), st.integers(1, 14)), min_size=1, max_size=7)
shapes = st.sets(st.tuples(st.integers(1, 4), st.integers(1, 9)).map(lambda s: Shape(*s)), min_size=1, max_size=4)
plans = st.none() | st.tuples(shapes, st.booleans()).map(lambda p: BucketPlan(compiled=p[0]) if p[1] else BucketPlan(plain=p[0]))
settings_ = st.fixed_dictionaries(
    {
        "max_batch": st.integers(1, 4),
        "chunk": st.integers(1, 5),
        "context": st.integers(1, 4),
        "ramp": st.sampled_from([(), (1,), (2, 1, 3)]),
        "lookahead": st.integers(0, 2),
        "rate": st.sampled_from([2.0, 8.0, 32.0, math.inf]),
        "playback": st.sampled_from([4.0, 8.0]),
        "upsample": st.just(8),
        "trim": st.integers(0, 3),
        "pad_frames": st.booleans(),
        "pad_batch": st.booleans(),
    }
)
costs = st.builds(Linear, base=st.integers(10, 900), each=st.integers(0, 60), saved=st.integers(0, 8))


def run(trace, profile, plan, settings):
    names = {"chunk": "chunk_size", "context": "left_context_size", "rate": "frames_per_second"}
    return simulate(trace, profile, plan, **{names.get(name, name): value for name, value in settings.items()})


@given(requests=requests, plan=plans, settings=settings_, profile=costs)
def test_it_is_what_the_rules_say(requests, plan, settings, profile):
    trace = trace_of(*requests)
    served = run(trace, profile, plan, settings)
    calls, heard = slowly(trace, profile, plan, **settings)
    shapes = [served.routes[i].shape for i in served.taken]
    assert list(zip(served.start, served.ms, shapes, batches(served), strict=True)) == calls
    for mine, theirs in zip(zip(served.first_audio, served.stalls, served.stalled, strict=True), heard, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9)


@given(requests=requests, plan=plans, settings=settings_, profile=costs)
def test_laws_of_every_run(requests, plan, settings, profile):
    trace = trace_of(*requests)
    served = run(trace, profile, plan, settings)
    end = served.start + served.ms / 1e3
    sizes = np.bincount(served.call)
    assert 1 <= sizes.min() <= sizes.max() <= settings["max_batch"]
    assert served.calls == Counter(Shape(n, int(served.frames[served.call == i].max())) for i, n in enumerate(sizes.tolist()))
    assert (served.waiting >= 0).all()  # nothing is decoded before it is due
    assert (served.start[1:] >= end[:-1]).all()  # one decoder
    for r in range(len(requests)):
        assert (np.diff(served.call[served.request == r]) >= 0).all()  # in order
    begun = served.start[served.call]
    for before, now in pairwise(range(len(end))):  # never idle while something waits
        idle = served.start[now] > end[before]
        assert not idle or not ((served.due < served.start[now]) & (begun >= served.start[now])).any()
    if not settings["pad_frames"]:
        assert all(len(set(served.frames[served.call == i])) == 1 for i in range(len(sizes)))
    assert served.busy == pytest.approx(served.ms.sum() / 1e3)
    assert 0 < served.utilisation <= 1 + 1e-12


@given(requests=requests, chunk=st.integers(1, 5), context=st.integers(0, 4), ramp=st.sampled_from([(), (1,), (2, 3)]))
def test_without_batching_the_calls_are_the_traces(requests, chunk, context, ramp):
    trace = trace_of(*requests)
    served = simulate(trace, Linear(), None, max_batch=1, chunk_size=chunk, left_context_size=context, ramp=ramp)
    assert dict(served.calls) == trace.calls(chunk, context, ramp)


def test_one_request_by_hand():
    # 5 + 25 + 25 + 5 frames at 25 a second; a call takes 40 ms; with context the calls see 5, 30, 50, 30 frames
    served = simulate(trace_of((10.0, 60)), Linear(base=40, each=0), None, max_batch=8, ramp=(5,))
    assert served.frames.tolist() == [5, 30, 50, 30]
    assert served.due == pytest.approx([10.2, 11.2, 12.2, 12.4])
    assert served.start == pytest.approx(served.due)
    assert served.first_audio == pytest.approx([0.24])
    # plays 0.4 s from 10.24, the next audio is there at 11.24; then 2 s a second before each is needed
    assert served.stalls.tolist() == [1]
    assert served.stalled == pytest.approx([0.6])
    assert served.utilisation == pytest.approx(0.16 / 2.24)
    assert served.summary()["first_audio_p95"] == pytest.approx(0.24)


def test_trim_makes_the_first_audio_short():
    # chunks of 1 frame, all frames at once, 10 ms a call: the second comes 10 ms after the first, which plays 100 - 95 ms
    how = {"max_batch": 1, "chunk_size": 1, "left_context_size": 1, "frames_per_second": math.inf, "playback": 10.0}
    assert simulate(trace_of((0.0, 2)), Linear(10, 0), None, **how).stalled == pytest.approx([0])
    assert simulate(trace_of((0.0, 2)), Linear(10, 0), None, upsample=100, trim=95, **how).stalled == pytest.approx([0.005])


def test_lookahead_delays_all_but_the_end():
    served = simulate(trace_of((0.0, 60)), Linear(), None, max_batch=1, lookahead=5)
    assert served.due == pytest.approx([30 / 25, 55 / 25, 60 / 25])


def test_generation_as_fast_as_playback_does_not_stall():
    trace = trace_of(*((1000.1 * k, 500) for k in range(20)))
    served = simulate(trace, Linear(base=7, each=0), None, max_batch=1, frames_per_second=12.5)
    assert served.stalls.tolist() == [0] * 20


def test_what_waits_is_decoded_together_first_come_first_served():
    trace = trace_of((0.0, 25), (0.1, 20), (0.2, 10), (0.3, 20))
    profile, how = Linear(base=10_000, each=0), {"frames_per_second": math.inf}
    mixed = simulate(trace, profile, None, max_batch=2, **how)
    assert batches(mixed) == [[(0, 0)], [(1, 0), (2, 0)], [(3, 0)]]
    assert [str(s) for s in mixed.calls] == ["1x25", "2x20", "1x20"]
    equal = simulate(trace, profile, None, max_batch=2, pad_frames=False, **how)
    assert batches(equal) == [[(0, 0)], [(1, 0), (3, 0)], [(2, 0)]]


def test_no_chunk_overtakes_an_earlier_one_of_its_request():
    # While 0 is decoded, 2 x 25 frames of request 2 come in behind 50 of request 1: the second (50 with context) fits the call
    # of request 1, but its first (25) has to wait.
    trace = trace_of((0.0, 1), (0.1, 50), (0.2, 50))
    served = simulate(trace, Linear(10_000, 0), None, max_batch=8, frames_per_second=math.inf, pad_frames=False)
    assert batches(served) == [[(0, 0)], [(1, 0), (2, 0)], [(1, 1), (2, 1)]]
    first = simulate(trace_of((0.0, 1), (0.1, 25), (0.2, 50)), Linear(10_000, 0), None, max_batch=1, frames_per_second=25, pad_frames=False)
    assert batches(first) == [[(0, 0)], [(1, 0)], [(2, 0)], [(2, 1)]]


def test_calls_say_how_they_were_served():
    plan = BucketPlan.grid([1, 2], [25], compiled=[(1, 25)])
    served = simulate(trace_of((0.0, 25), (50.0, 20), (100.0, 25), (100.0, 25), (150.0, 300)), Linear(), plan, max_batch=2, chunk_size=300)
    calls = served.to_frame("calls")
    assert calls["kind"].tolist() == ["exact", "padded", "exact", "fallback"]
    assert calls["bucket"].tolist() == ["1x25 compiled", "1x25 compiled", "2x25", ""]
    assert calls["compiled"].tolist() == [True, True, False, False]
    assert calls["reason"].tolist() == ["", "", "", "no_bucket"]
    assert calls["padded_frames"].tolist() == [0, 5, 0, 0]
    assert calls["ms"].tolist() == [14.5, 14.5, 28.0, 162.0]
    summary = served.summary()
    assert summary["hit_rate"] == 0.75
    assert summary["mean_batch"] == 1.25
    assert summary["padded_share"] == pytest.approx(5 / 400)
    eager = simulate(trace_of((0.0, 25)), Linear(), None, max_batch=2).to_frame("calls")
    assert eager[["kind", "reason", "padded_frames"]].values.tolist() == [["fallback", "disabled", 0]]


def test_frames_of_requests_and_chunks():
    served = simulate(trace_of((0.0, 60), (1.0, 5)), Linear(), None, max_batch=2)
    requests, chunks = served.to_frame(), served.to_frame("chunks")
    assert requests["arrival"].tolist() == [0.0, 1.0]
    assert (requests["first_audio"] == served.first_audio).all()
    assert chunks["request"].tolist() == [0, 0, 0, 1]
    assert (chunks["ready"] > chunks["due"]).all()
    assert served.quantile(0.5, "ms") == np.median(served.ms)


def steady(seconds_apart, n=400, frames=25):
    return trace_of(*((k * seconds_apart, frames) for k in range(n)))


def test_saturation_is_where_more_comes_than_can_be_served():
    # one chunk a second and 100 ms a call: saturated from load 10 on, or from 40 on when four are decoded together
    loads, plans = [1, 8, 9.5, 10.5, 20, 35, 39, 42], {"eager": None}
    alone = load_curve(steady(1.0), Linear(100, 0), plans, loads, max_batch=1)
    four = load_curve(steady(1.0), Linear(100, 0), plans, loads, max_batch=4)
    assert saturates_at(alone) == {"eager": 10.5}
    assert saturates_at(four) == {"eager": 42}
    busy = four[four["load"] == 35].iloc[0]
    assert busy["utilisation"] > 0.95  # always at work, and yet it keeps up
    assert not busy["saturated"]
    assert saturates_at(load_curve(steady(1.0), Linear(100, 0), plans, [1, 2], max_batch=1)) == {"eager": None}


def test_a_queue_that_has_gone_is_not_saturation_and_one_that_stays_is():
    # 50 requests at once, 100 ms each, then one a second for 100 s: gone after 5.5 s; one each 100 ms: never
    burst = [(0.0, 25)] * 50
    assert not simulate(trace_of(*burst, *((k + 1.0, 25) for k in range(100))), Linear(100, 0), None, max_batch=1).saturated
    assert simulate(trace_of(*burst, *((k / 10, 25) for k in range(1000))), Linear(100, 0), None, max_batch=1).saturated


@pytest.mark.parametrize(("apart", "at_once", "times"), [(0.25, 2, 5), (2.0, 10, 100)])
def test_bursts_that_are_served_in_time_are_not_saturation(apart, at_once, times):
    trace = trace_of(*((k * apart, 25) for k in range(times) for _ in range(at_once)))
    assert not simulate(trace, Linear(100, 0), None, max_batch=1, frames_per_second=math.inf).saturated


@pytest.mark.parametrize("seed", range(5))
def test_chance_is_not_taken_for_saturation(seed):
    rng = np.random.default_rng(seed)
    trace = Trace(np.cumsum(rng.exponential(0.125, 2000)), np.full(2000, 25), "random")
    assert not simulate(trace, Linear(100, 0), None, max_batch=1).saturated
    assert simulate(trace.scale(1.5), Linear(100, 0), None, max_batch=1).saturated


def test_more_load_waits_longer_and_graphs_keep_up_longer():
    rng = np.random.default_rng(0)
    trace = Trace(np.cumsum(rng.exponential(0.5, 600)), rng.integers(10, 200, 600), "random")
    plan, seen = BucketPlan.grid([1, 2, 4, 8], [25, 50]), []
    curve = load_curve(
        trace, Linear(12, 0.1), {"eager": None, "plan": plan}, [1, 4, 2, 8, 16], max_batch=8, progress=lambda *n: seen.append(n)
    )
    assert seen == [(k, 10) for k in range(1, 11)]
    for _, rows in curve.groupby("plan"):
        assert rows["load"].is_monotonic_increasing
        assert rows["first_audio_p95"].is_monotonic_increasing
        assert rows["utilisation"].is_monotonic_increasing
        assert rows["mean_batch"].is_monotonic_increasing
    eager, planned = (curve[curve["plan"] == name].reset_index() for name in ("eager", "plan"))
    assert (planned["first_audio_p50"] < eager["first_audio_p50"]).all()
    assert (planned["hit_rate"] > 0.5).all()
    assert (eager["hit_rate"] == 0).all()


def test_progress_may_stop_a_load_curve():
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_curve(steady(1.0), Linear(), {"eager": None}, [1], max_batch=1, progress=stop)


def test_a_single_request_does_not_saturate():
    assert not simulate(trace_of((0.0, 500)), Linear(5000), None, max_batch=1).saturated


def most_called(calls):
    return BucketPlan(plain=tuple(shape for shape, _ in Counter(calls).most_common(3)))


def test_settle_ends_with_a_plan_for_its_own_calls():
    rng = np.random.default_rng(1)
    trace = Trace(np.cumsum(rng.exponential(0.1, 300)), rng.integers(10, 120, 300), "random")
    found = settle(trace, Linear(12, 0.1), most_called, 8)
    assert found.settled
    assert found.tried[0].plan is None
    assert found.plan.buckets == most_called(found.served.calls).buckets or found.served.busy == pytest.approx(found.tried[-2].busy, 1e-3)
    again = settle(trace, Linear(12, 0.1), most_called, 8, start=found.plan)
    assert again.settled


def test_settle_stops_at_a_plan_chosen_again():
    plan = BucketPlan(plain=(Shape(1, 25),))
    found = settle(steady(1.0, n=20), Linear(), lambda calls: plan, 4)
    assert found.settled
    assert [served.plan for served in found.tried] == [None, plan]


def test_settle_accepts_that_no_plan_pays():
    found = settle(steady(1.0, n=20), Linear(), lambda calls: None, 4)
    assert found.settled
    assert found.plan is None
    assert len(found.tried) == 1


def test_settle_stops_where_the_time_stays():
    turn = iter(range(9))  # the same bucket, and another one each time that nobody needs
    found = settle(steady(1.0, n=20), Linear(), lambda calls: BucketPlan(plain=(Shape(1, 25), Shape(1, 500 + next(turn)))), 4)
    assert found.settled
    assert len(found.tried) == 3
    assert found.plan == found.tried[-1].plan


def test_settle_says_when_it_does_not():
    trace, turn = steady(1.0, n=20), iter(range(9))
    plans = [BucketPlan(plain=(Shape(1, 50 + 50 * (k % 2)),)) for k in range(9)]
    found = settle(trace, Linear(100, 1, saved=90), lambda calls: plans[next(turn)], 4, rounds=3)
    assert not found.settled
    assert len(found.tried) == 4
    assert found.plan == plans[0]  # the smaller bucket takes less time
    with pytest.raises(ValueError, match="rounds=0"):
        settle(trace, Linear(), most_called, 4, rounds=0)


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"frames_per_second": 0}, {"frames_per_second": math.nan}, {"playback": -1}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        simulate(trace_of((0.0, 5)), Linear(), None, **{"max_batch": 1, **wrong})


@pytest.mark.parametrize("pad_frames", [True, False])
def test_twenty_thousand_requests_take_seconds(pad_frames):
    rng = np.random.default_rng(2)
    trace = Trace(np.sort(rng.uniform(0, 3600, 20_000)), rng.geometric(1 / 740, 20_000), "big")
    begun = time.perf_counter()
    served = simulate(trace, Linear(12, 0.06), BucketPlan.grid([1, 2, 4, 8], [25, 50]), max_batch=8, pad_frames=pad_frames)
    took = time.perf_counter() - begun
    assert len(served.due) > 590_000
    assert took < 20  # 1 to 2 s on a free core
