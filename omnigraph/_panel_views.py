"""From a panel's state to its figures: pure work, on the latest state only, with what is costly kept until it changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from omnigraph import figures
from omnigraph._debounce import Overtaken
from omnigraph._live import allowed
from omnigraph._panel_drawn import live, measured, summary
from omnigraph._panel_jobs import Applied, Player
from omnigraph._panel_state import SEARCHED, State, calls_of, plan_of
from omnigraph._prediction import Padding, Prediction, predictor
from omnigraph._warmup import Progress
from omnigraph.decoder import GraphedDecoder
from omnigraph.planner import plan_buckets
from omnigraph.profile import Profile
from omnigraph.serving import load_curve, simulate
from omnigraph.shapes import BucketPlan, Calls

if TYPE_CHECKING:
    import plotly.graph_objects as go

T = TypeVar("T")
HITS, COSTS, LOAD, LIVE, MEASURED = "Hits and latency", "Memory and budget", "Under load", "Live", "Measured"


class Kept:
    """The last result of each piece of work, until what it was made of changes."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def get(self, name: str, of: tuple[Any, ...], make: Callable[[], T]) -> T:
        held = self._held.get(name)
        if held is None or not all(a is b or a == b for a, b in zip(held[0], of, strict=True)):
            held = self._held[name] = (of, make())
        found: T = held[1]
        return found

    def clear(self) -> None:
        self._held.clear()


@dataclass(frozen=True)
class Look:
    """What a state looks like: its plan, a summary as HTML, its figures."""

    state: State
    calls: Calls
    plan: BucketPlan | None
    prediction: Prediction | None
    summary: str
    figures: list[go.Figure]


@dataclass
class Views:
    """Makes a `Look` of a state. What was measured (`applied`) and is played (`player`) is the panel's to set."""

    decoder: GraphedDecoder | None
    applied: list[Applied] = field(default_factory=list)
    player: Player | None = None
    measured_here: Profile | None = None
    kept: Kept = field(default_factory=Kept)

    def padding(self, state: State) -> Padding:
        """What may be done to a call: what the decoder's facts allow, or all, where there is no decoder to ask."""
        pads = state.wish.padding != "exact"
        return Padding(pads, pads) if self.decoder is None else Padding(**allowed(self.decoder.facts, pads))

    @property
    def by_frames(self) -> bool:
        """Whether calls are routed by batch x frames: a decoder without a cost function does."""
        return self.decoder is not None and self.decoder.cost is None

    def look(self, state: State, overtaken: Callable[[], bool], progress: Progress) -> Look:
        """Predict, and draw the figures of the view that is shown.

        Raises:
            ValueError: the state makes no sense, and why.
            Overtaken: a later state waits.
        """

        def step(what: str) -> None:
            if overtaken():
                raise Overtaken
            progress(what, 0, 1)

        traffic, profile, padding = state.traffic, state.profile, self.padding(state)
        if profile is not None:
            profile.__dict__["_warned"] = True  # of extrapolated times: the summary says so
        timed = profile if traffic.max_batch > 1 else None  # else the calls don't depend on times

        def calls_now() -> Calls:
            step(f"the calls of {len(traffic.trace):,} requests")
            return calls_of(traffic, profile)

        loaded = traffic if traffic.max_batch > 1 else (traffic.trace, traffic.chunk_size, traffic.left_context_size, traffic.ramp)
        calls = self.kept.get("calls", (loaded, timed), calls_now)
        if profile is None:
            plan = plan_of(state.wish, traffic, calls) if state.wish.preset not in SEARCHED else None
            return Look(state, calls, plan, None, "", self._without_times(state, calls))
        compiled = state.wish.compiled or None

        def search() -> Any:
            step("the best plans")
            return plan_buckets(calls, profile, compiled=compiled, **padding._asdict())

        plan, report = None, None
        if state.wish.preset in SEARCHED or state.view == COSTS:
            report = self.kept.get("report", (calls, profile, padding, compiled), search)
        plan = plan_of(state.wish, traffic, calls, report)
        predict = self.kept.get("predict", (calls, profile, self.by_frames), lambda: predictor(calls, profile, by_frames=self.by_frames))
        found = predict(plan, padding)
        source = f"predicted from {self.source(profile)}; calls of {traffic}"
        if state.view == HITS:
            drawn = [
                figures.hit_map(found.calls, source),
                figures.latency_distribution(found.latency(), source),
                figures.padded_work_by_bucket(found.work, source),
            ]
        elif state.view == COSTS:
            assert report is not None
            own = len(plan or ()), found.summary["ms"]
            drawn = [
                figures.gain_curve(report.curve_frame(), source, knee=report.knee, plan=own),
                *([figures.bucket_costs(found.costs, source)] if plan else []),
            ]
        elif state.view == LOAD:
            drawn = self._under_load(state, profile, plan, padding, overtaken, progress)
        elif state.view == LIVE:
            drawn = live(self.decoder, self.player)
        else:
            drawn = measured(self.applied, found, source)
        return Look(state, calls, plan, found, summary(found, plan, profile.at(list(calls), "eager")[1].sum(), len(calls)), drawn)

    def source(self, profile: Profile) -> str:
        """Where a profile's times are from."""
        p, how = profile.provenance, "measured here" if profile is self.measured_here else "recorded"
        about = ", ".join(p[name] for name in ("device", "date") if name in p) or "a device that is not named"
        return f"times {how} on {about} ({profile.made_for.get('model', 'a model')}, {profile.made_for.get('dtype', 'dtype unknown')})"

    def _without_times(self, state: State, calls: Calls) -> list[go.Figure]:
        if state.view == LIVE:
            return live(self.decoder, self.player)
        if state.view == MEASURED:
            return measured(self.applied, None, "")
        return [figures.calls_histogram(calls, f"calls of {state.traffic}; no times yet")]

    def _under_load(
        self, state: State, profile: Profile, plan: BucketPlan | None, padding: Padding, overtaken: Callable[[], bool], progress: Progress
    ) -> list[go.Figure]:
        traffic = state.traffic
        how: dict[str, Any] = {**traffic.cut, "pad_frames": padding.pad_frames, "pad_batch": padding.pad_batch}
        plans: dict[str, BucketPlan | None] = {"eager": None, **({"this plan": plan} if plan else {})}

        def tell(done: int, total: int) -> None:
            if overtaken():
                raise Overtaken
            progress("serving the trace at several loads", done, total)

        def curve() -> Any:
            tell(0, 1)
            once = [simulate(traffic.trace, profile, p, **how).utilisation for p in plans.values()]
            low, high = 0.3 / max(once), 1.2 / min(once)
            loads = [float(f"{low * (high / low) ** (i / 5):.2g}") for i in range(6)]
            return load_curve(traffic.trace, profile, plans, sorted(set(loads)), progress=tell, **how)

        key = (traffic.trace, tuple(traffic.cut.items()), profile, plan and plan.buckets, padding)
        frame = self.kept.get("curve", key, curve)
        source = f"simulated with {self.source(profile)}; {traffic}; frames come at 25 a second"
        served = self.kept.get("served", (*key, traffic.load), lambda: simulate(traffic.trace.scale(traffic.load), profile, plan, **how))
        timeline = figures.call_timeline(served.to_frame("calls"), f"{source}; load {traffic.load:g}")
        return [figures.service_by_load(frame, source), timeline]
