"""From a panel's state to its figures: pure work, on the latest state only, with what is costly kept until it changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from omnigraph import figures
from omnigraph._debounce import Overtaken
from omnigraph._html import table
from omnigraph._live import allowed
from omnigraph._needs import need
from omnigraph._panel_jobs import Applied, Player
from omnigraph._panel_state import SEARCHED, State, calls_of, plan_of
from omnigraph._prediction import Padding, Prediction, predictor
from omnigraph._provenance import device_name
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
            drawn = self._live()
        else:
            drawn = self._measured(found, source)
        return Look(state, calls, plan, found, _summary(found, plan, profile.at(list(calls), "eager")[1].sum(), len(calls)), drawn)

    def source(self, profile: Profile) -> str:
        """Where a profile's times are from."""
        p, how = profile.provenance, "measured here" if profile is self.measured_here else "recorded"
        about = ", ".join(p[name] for name in ("device", "date") if name in p) or "a device that is not named"
        return f"times {how} on {about} ({profile.made_for.get('model', 'a model')}, {profile.made_for.get('dtype', 'dtype unknown')})"

    @property
    def here(self) -> str:
        """Where what this decoder does is measured."""
        assert self.decoder is not None
        first = next(self.decoder.module.parameters(), None)
        dtype = "" if first is None else f", {str(first.dtype).removeprefix('torch.')}"
        return (
            f"measured here on {device_name(self.decoder.device)}{dtype}, backend {'cuda' if self.decoder.device.type == 'cuda' else 'cpu'}"
        )

    def _without_times(self, state: State, calls: Calls) -> list[go.Figure]:
        if state.view == LIVE:
            return self._live()
        if state.view == MEASURED:
            return self._measured(None, "")
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

    def _live(self) -> list[go.Figure]:
        if self.decoder is None:
            return []
        drawn, player = [], self.player
        if player is not None and player.rows:
            source = f"{self.here}; {player.trace.name} at {player.speed:g} times its pace"
            timeline = figures.call_timeline(player.to_frame(), source)
            for since, graphs in player.captures[1:]:
                timeline.add_vline(x=since, line={"dash": "dot", "color": "#555"}, annotation={"text": f"{graphs} graphs"})
            drawn.append(timeline)
            drawn.append(figures.hit_map(player.to_frame().assign(calls=1), source))
        elif self.decoder.stats.calls:
            drawn.append(figures.outcomes_by_frames(self.decoder.stats.to_frame(), f"{self.here}: all calls counted by the decoder"))
        return drawn

    def live_table(self) -> str:
        """What the played calls met, plan by plan."""
        if self.player is None or not self.player.rows:
            return ""
        rows = [
            [
                f"{r['graphs']} graphs, since {r['since']:.1f} s",
                r["calls"],
                f"{r['hit_rate']:.1%}",
                r["p50_ms"],
                r["p95_ms"],
                r["padded_frames"],
            ]
            for r in self.player.by_plan().to_dict("records")
        ]
        heads = ["captured", "calls", "served by replays", "p50 ms", "p95 ms", "frames of padding"]
        return table(f"{'Playing' if self.player.playing else 'Played'} {self.player.trace.name}", heads, rows)

    def _measured(self, found: Prediction | None, source: str) -> list[go.Figure]:
        timed = [applied for applied in self.applied if applied.driven is not None][-2:]
        drawn = []
        if timed:
            now = timed[-1].driven
            assert now is not None
            here = f"measured here on {now.device}, backend {now.backend}, {now.dtype}; {now.calls} calls"
            both = found.against(now.to_frame()) if found is not None else None
            if both is not None and len(both):
                drawn.append(figures.predicted_against_measured(both, f"{source}; {here}"))
            ways = {"before": timed[0].driven} if len(timed) > 1 else {}
            ways |= {"this plan": now}
            times = [("eager", ms, row.calls / len(row.eager_ms)) for row in now.rows for ms in row.eager_ms]
            times += [(way, ms, 1.0) for way, driven in ways.items() if driven for row in driven.rows for ms in row.decode_ms]
            frame = need("pandas").DataFrame(times, columns=["way", "ms", "calls"])
            drawn.append(figures.latency_distribution(frame, f"{here}{'; before: the plan applied before' if len(ways) > 1 else ''}"))
            drawn.append(figures.latency_by_shape(now.to_frame(), here))
        if self.applied and self.applied[-1].report.captured:
            last = self.applied[-1].report
            drawn.append(figures.memory_by_bucket(last.to_frame(), f"measured here, backend {last.backend}"))
        return drawn


def _summary(found: Prediction, plan: BucketPlan | None, outside: int, shapes: int) -> str:
    """The plan in numbers."""
    s = found.summary
    numbers = {
        "graphs": f"{s['graphs']:.0f}",
        "calls served by replays": f"{100 * s['hit_rate']:.1f}%",
        "ms a call": f"{s['ms']:.3g} (eager {s['eager_ms']:.3g})",
        "times as fast": f"{s['eager_ms'] / s['ms']:.2f}",
        "padding": f"{100 * s['padded_share']:.1f}% of frames",
        "pool": f"{s['pool_bytes'] / 2**20:,.0f} MiB",
        "warm-up": f"{s['warmup_seconds']:.1f} s",
        "calls": f"{s['calls']:,.0f}",
    }
    notes = [] if plan else ["No bucket: all calls go eager."]
    if outside:
        notes.append(f"{outside} of {shapes} shapes called lie outside what was measured: their times are extrapolated.")
    spans = "".join(
        f'<div style="padding:2px 16px 2px 0"><span style="color:#666">{n}</span><br><b>{v}</b></div>' for n, v in numbers.items()
    )
    told = "".join(f"<div>{note}</div>" for note in notes)
    return f'{told}<div style="display:flex;flex-wrap:wrap;line-height:1.35">{spans}</div>'
