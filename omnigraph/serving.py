"""Serve a trace with one decoder: which chunks are decoded together, how long they wait, and when the audio is heard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnigraph._needs import need
from omnigraph._queue import decode_equal, decode_mixed, play
from omnigraph._served import Served
from omnigraph.chunks import schedule
from omnigraph.shapes import BucketPlan, Calls, Cost, Route, Shape, route

if TYPE_CHECKING:
    import pandas as pd

    from omnigraph.profile import Profile
    from omnigraph.trace import Trace

STEADY = 1e-3  # `settle` stops where the busy time changes by less than this share

__all__ = ["Served", "Settled", "call_ms", "load_curve", "saturates_at", "settle", "simulate"]


def simulate(
    trace: Trace,
    profile: Profile,
    plan: BucketPlan | None,
    *,
    max_batch: int,
    chunk_size: int = 25,
    left_context_size: int = 25,
    ramp: Sequence[int] = (),
    lookahead: int = 0,
    frames_per_second: float = 25.0,
    playback: float | None = None,
    upsample: int = 1,
    trim: int = 0,
    pad_frames: bool = True,
    pad_batch: bool = True,
) -> Served:
    """Stream the requests of `trace` through one decoder, event by event.

    A chunk is due when the model before the decoder has generated its frames (and `lookahead` more): request arrival plus
    frames over `frames_per_second`. That rate is an assumption, the same for each request at any load; `math.inf` makes all
    frames come with the request. When the decoder is free, the chunks that wait are decoded together, first come first served,
    up to `max_batch`: with `pad_frames` whichever they are, padded to the longest; without it those as long as the first one.
    Two chunks of one request may share a call (each brings its own context), but none overtakes an earlier one. A call takes
    what `route` picks among the plan's buckets and `profile.cost` says; `plan=None` decodes all of it eagerly.

    A request is played, at `playback` frames a second (None: the trace's frame rate), from the moment its first audio is decoded.
    `upsample` and `trim` (samples) matter where the trim is no small part of a chunk: they say how much audio a chunk adds.

    Raises:
        ValueError: a size is out of range, or a rate not positive.
    """
    playback = trace.frame_rate if playback is None else playback
    if max_batch < 1 or not frames_per_second > 0 or not playback > 0:
        raise ValueError(f"needs max_batch of at least 1 and positive rates; got {max_batch=}, {frames_per_second=}, {playback=}")
    np = need("numpy")
    sizes = {"chunk_size": chunk_size, "left_context_size": left_context_size, "lookahead": lookahead, "upsample": upsample, "trim": trim}
    cuts = {
        n: np.array([(c.last - c.first, c.last, c.at) for c in schedule(n, ramp=tuple(ramp), **sizes)])
        for n in np.unique(trace.frames).tolist()
    }
    parts = [cuts[n] for n in trace.frames.tolist()]
    frames, last, at = np.concatenate(parts).T
    counts = np.array([len(part) for part in parts])
    request = np.repeat(np.arange(len(parts)), counts)
    due = trace.arrival[request] + last / frames_per_second

    prices = _Prices(plan, profile.cost, pad_frames, pad_batch)
    if pad_frames:
        call, start, ms, taken = decode_mixed(due, frames, max_batch, prices)
    else:
        call, start, ms, taken = decode_equal(request, due, frames, max_batch, prices)
    ready, first = (start + ms / 1e3)[call], np.cumsum(counts) - counts
    stalls, stalled = play(ready - at / upsample / playback, first, counts)
    heard = ready[first] - trace.arrival
    routes = tuple(prices.routes)
    return Served(plan, max_batch, routes, request, frames, due, call, start, ms, taken, trace.arrival, heard, stalls, stalled)


class _Prices(dict[tuple[int, int], tuple[int, float]]):
    """(batch, frames) -> (index in `routes`, milliseconds), worked out once for each shape."""

    def __init__(self, plan: BucketPlan | None, cost: Cost, pad_frames: bool, pad_batch: bool) -> None:
        self.buckets, self.cost = plan.buckets if plan else (), cost
        self.pad = {"pad_frames": pad_frames, "pad_batch": pad_batch}
        self.routes: list[Route] = []

    def __missing__(self, key: tuple[int, int]) -> tuple[int, float]:
        shape = Shape(*key)
        self.routes.append(route(shape, self.buckets, self.cost, **self.pad))
        self[key] = found = (len(self.routes) - 1, call_ms(self.routes[-1], self.cost))
        return found


def call_ms(taken: Route, cost: Cost) -> float:
    """Milliseconds of one call that takes a route: its replays, or one eager run."""
    if not taken.parts:
        return cost(taken.shape, "eager")
    return sum(cost(bucket.shape, "compiled" if bucket.compiled else "plain") for bucket, _ in taken.parts)


def load_curve(
    trace: Trace,
    profile: Profile,
    plans: Mapping[str, BucketPlan | None],
    loads: Sequence[float],
    *,
    progress: Callable[[int, int], object] | None = None,
    **how: Any,
) -> pd.DataFrame:
    """Simulate each plan (None: eager) at each load, a factor on the arrival rate: one row with `Served.summary` for each.

    `how` goes to `simulate`; `progress(done, total)` is called after each run, and may raise to stop.
    """
    rows: list[dict[str, Any]] = []
    for load in sorted(loads):
        scaled = trace.scale(load)
        for name, plan in plans.items():
            rows.append({"load": load, "plan": name, **simulate(scaled, profile, plan, **how).summary()})
            if progress is not None:
                progress(len(rows), len(loads) * len(plans))
    frame: pd.DataFrame = need("pandas").DataFrame(rows)
    return frame


def saturates_at(curve: pd.DataFrame) -> dict[str, float | None]:
    """The lowest load of a `load_curve` from which on each plan is saturated; None where it isn't at the highest."""
    found: dict[str, float | None] = {}
    for name, rows in curve.sort_values("load", ascending=False).groupby("plan", sort=False):
        found[str(name)] = None
        for load, saturated in zip(rows["load"], rows["saturated"], strict=True):
            if not saturated:
                break
            found[str(name)] = float(load)
    return found


@dataclass(frozen=True, eq=False)
class Settled:
    """What `settle` chose: `served` with its `.plan`, whether that `settled`, and every round `tried` (the start first)."""

    served: Served
    settled: bool
    tried: tuple[Served, ...]

    @property
    def plan(self) -> BucketPlan | None:
        return self.served.plan


def settle(
    trace: Trace,
    profile: Profile,
    choose: Callable[[Calls], BucketPlan | None],
    max_batch: int,
    rounds: int = 5,
    *,
    start: BucketPlan | None = None,
    **how: Any,
) -> Settled:
    """Plan for the batches that the plan itself brings about: simulate, `choose` a plan for the calls seen, simulate it, ...

    Starts with `start` (None: eager); `choose` may choose None too. Settled when the chosen plan, or the time that all calls take
    (to 0.1 %), stays as it was; after `rounds` choices it gives up and returns the round of least time. `how` goes to `simulate`.
    """
    if rounds < 1:
        raise ValueError(f"expected at least one round, got {rounds=}")
    tried = [simulate(trace, profile, start, max_batch=max_batch, **how)]
    for _ in range(rounds):
        last = tried[-1]
        plan = choose(last.calls)
        if (plan and plan.buckets) == (last.plan and last.plan.buckets):
            return Settled(last, True, tuple(tried))
        tried.append(simulate(trace, profile, plan, max_batch=max_batch, **how))
        if last is not tried[0] and abs(tried[-1].busy - last.busy) <= STEADY * last.busy:
            return Settled(tried[-1], True, tuple(tried))
    return Settled(min(tried[1:], key=lambda served: served.busy), False, tuple(tried))
