"""What a panel shows besides predictions: the plan in numbers, calls as they are played, and what was measured after `Apply`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnigraph import figures
from omnigraph._html import table
from omnigraph._needs import need
from omnigraph._panel_jobs import Applied, Player
from omnigraph._prediction import Prediction
from omnigraph._provenance import device_name
from omnigraph.decoder import GraphedDecoder
from omnigraph.shapes import BucketPlan

if TYPE_CHECKING:
    import plotly.graph_objects as go


def here(decoder: GraphedDecoder) -> str:
    """Where what a decoder does is measured."""
    first = next(decoder.module.parameters(), None)
    dtype = "" if first is None else f", {str(first.dtype).removeprefix('torch.')}"
    return f"measured here on {device_name(decoder.device)}{dtype}, backend {'cuda' if decoder.device.type == 'cuda' else 'cpu'}"


def live(decoder: GraphedDecoder | None, player: Player | None) -> list[go.Figure]:
    """What is played, as it comes; before anything was played, what the decoder has counted."""
    if decoder is None:
        return []
    drawn: list[go.Figure] = []
    if player is not None and player.rows:
        source = f"{here(decoder)}; {player.trace.name} at {player.speed:g} times its pace"
        timeline = figures.call_timeline(player.to_frame(), source)
        for since, graphs in player.captures[1:]:
            timeline.add_vline(x=since, line={"dash": "dot", "color": "#555"}, annotation={"text": f"{graphs} graphs"})
        drawn.append(timeline)
        drawn.append(figures.hit_map(player.to_frame().assign(calls=1), source))
    elif decoder.stats.calls:
        drawn.append(figures.outcomes_by_frames(decoder.stats.to_frame(), f"{here(decoder)}: all calls counted by the decoder"))
    return drawn


def live_table(player: Player | None) -> str:
    """What the played calls met, plan by plan."""
    if player is None or not player.rows:
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
        for r in player.by_plan().to_dict("records")
    ]
    heads = ["captured", "calls", "served by replays", "p50 ms", "p95 ms", "frames of padding"]
    return table(f"{'Playing' if player.playing else 'Played'} {player.trace.name}", heads, rows)


def measured(applied: list[Applied], found: Prediction | None, source: str) -> list[go.Figure]:
    """What the calls timed after `Apply` took, beside the prediction and the plan before."""
    timed = [one for one in applied if one.driven is not None][-2:]
    drawn: list[go.Figure] = []
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
    if applied and applied[-1].report.captured:
        last = applied[-1].report
        drawn.append(figures.memory_by_bucket(last.to_frame(), f"measured here, backend {last.backend}"))
    return drawn


def summary(found: Prediction, plan: BucketPlan | None, outside: int, shapes: int) -> str:
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
