"""Figures of a plan: what its buckets cost, and what they bring."""

from __future__ import annotations

from collections import Counter
from itertools import cycle
from textwrap import wrap
from typing import TYPE_CHECKING

from omnigraph._drawing import COLOURS, colours_of, finish, log_axis, plotly
from omnigraph._needs import need

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from omnigraph.shapes import Calls


def memory_by_bucket(frame: pd.DataFrame, source: str) -> go.Figure:
    """What each bucket's capture added to the pool that all share, in the order of capture.

    Args:
        frame: `CaptureReport.to_frame()`: captured, mib.
        source: device, date, measured or recorded.
    """
    go = plotly()
    taken = frame[frame["captured"] != ""]
    figure = go.Figure(go.Bar(x=taken["captured"], y=taken["mib"], marker_color=COLOURS["memory"], name="added to the pool"))
    return finish(figure, "Memory by bucket", "bucket (batch x frames), in order of capture", "MiB added to the shared pool", source)


def padded_work_by_bucket(frame: pd.DataFrame, source: str) -> go.Figure:
    """Frames that each bucket decodes, those asked for and those of padding; what goes eager stands beside.

    Args:
        frame: `Prediction.work`: bucket ("eager" for the calls without one), asked_frames, padded_frames.
        source: device, date, measured, recorded or predicted.
    """
    go, figure = plotly(), plotly().Figure()
    eager = frame["bucket"] == "eager"
    for name, column, rows, colour in (
        ("asked for", "asked_frames", ~eager, "exact"),
        ("padding", "padded_frames", ~eager, "padded"),
        ("decoded eagerly", "asked_frames", eager, "fallback"),
    ):
        if frame[column][rows].any():
            figure.add_trace(go.Bar(x=frame["bucket"][rows], y=frame[column][rows], name=name, marker_color=COLOURS[colour]))
    padded, asked = frame["padded_frames"].sum(), frame["asked_frames"].sum()
    title = f"Padded work: {padded / max(padded + asked, 1):.1%} of all frames decoded"
    figure = finish(figure, title, "bucket (batch x frames)", "frames decoded, all calls", source, barmode="stack", showlegend=True)
    return figure.update_xaxes(type="category", categoryorder="array", categoryarray=list(frame["bucket"]))


def bucket_costs(frame: pd.DataFrame, source: str) -> go.Figure:
    """What each bucket adds to the pool that all share, and to the warm-up.

    Args:
        frame: `Prediction.costs`, or `CaptureReport.to_frame()`: bucket, mib, seconds (and compile_seconds).
        source: device, date, measured, recorded or predicted.
    """
    go, figure = plotly(), need("plotly.subplots").make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.04)
    seconds = frame["seconds"] + frame.get("compile_seconds", 0.0)
    for at, (name, values, colour, form) in enumerate(
        (("memory", frame["mib"], "memory", "{:,.1f}"), ("warm-up", seconds, "replay", "{:.2f}")), 1
    ):
        look = {"marker_color": COLOURS[colour], "text": values.map(form.format), "textposition": "auto", "cliponaxis": False}
        figure.add_trace(go.Bar(y=frame["bucket"], x=values, name=name, orientation="h", hovertemplate="%{y}: %{x:.4g}", **look), 1, at)
    title = f"Memory and warm-up: {frame['mib'].sum():,.0f} MiB, {seconds.sum():.1f} s"
    figure = finish(figure, title, "MiB added to the shared pool", "bucket (batch x frames)", source, showlegend=False)
    figure.update_xaxes(title="seconds of warm-up", row=1, col=2)
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=list(frame["bucket"])[::-1], automargin=True)
    return figure.update_layout(height=max(320, 180 + 18 * len(frame)))


def gain_curve(frame: pd.DataFrame, source: str, *, knee: int | None = None, plan: tuple[int, float] | None = None) -> go.Figure:
    """Expected milliseconds of a call with the best plan of each number of graphs.

    Args:
        frame: `PlanReport.curve_frame()`: graphs, ms, buckets.
        source: device, date, measured or recorded times.
        knee: `PlanReport.knee`, a dotted line.
        plan: graphs and milliseconds a call of the plan in use, a star.
    """
    go = plotly()
    shown = frame["buckets"].map(lambda names: "<br>".join(wrap(names, 60)[:6]) or "all eager")
    curve = {"x": frame["graphs"], "y": frame["ms"], "customdata": shown, "hovertemplate": "%{x}: %{y:.3f} ms<br>%{customdata}"}
    line = {"color": COLOURS["replay"]}
    figure = go.Figure(go.Scatter(**curve, name="best for each number", mode="lines+markers", line=line))
    last, own = int(frame["graphs"].max()), plan[0] if plan else 0
    if knee is not None:
        figure.add_vline(x=knee, line={"dash": "dot", "color": "#555"}, annotation={"text": f"knee: {knee}"})
        last = min(last, max(3 * knee, 2 * own, 12))  # a long tail that brings nothing is for who zooms out
    if plan is not None:
        star = {"symbol": "star", "size": 16, "color": COLOURS["fallback"]}
        name = f"this plan: {own} graphs, {plan[1]:.3g} ms"
        figure.add_trace(go.Scatter(x=[own], y=[plan[1]], name=name, mode="markers", marker=star))
    figure = finish(figure, "What each further graph brings", "graphs", "expected ms a call", source, showlegend=True)
    figure.update_xaxes(range=[-0.5, max(last, own) + 0.5], tickformat="d").update_yaxes(rangemode="tozero")
    return figure.update_layout(legend={"orientation": "h", "y": -0.2})


def side_by_side(frame: pd.DataFrame, source: str) -> go.Figure:
    """Expected milliseconds of a call: eager, the plan, the heuristic, and with a graph for every shape.

    Args:
        frame: `PlanReport.to_frame()`: ms, graphs, hit_rate, by name.
        source: device, date, measured or recorded times.
    """
    go, figure = plotly(), plotly().Figure()
    for row, colour in zip(frame.itertuples(), colours_of(frame.index), strict=True):
        text = f"{row.ms:.3g} ms, {row.graphs} graphs, {row.hit_rate:.0%} hits"
        figure.add_trace(go.Bar(x=[row.ms], y=[row.Index], name=str(row.Index), orientation="h", text=text, marker_color=colour))
    figure = finish(figure, "Expected time of a call", "ms a call, mean", "", source, showlegend=False, barmode="overlay")
    return figure.update_yaxes(autorange="reversed")


def calls_histogram(calls: Calls, source: str) -> go.Figure:
    """How often each length is called, over all batch sizes.

    Args:
        calls: how often each shape is called.
        source: the trace.
    """
    frames = Counter[int]()
    for shape, n in calls.items():
        frames[shape.frames] += n
    figure = plotly().Figure(plotly().Bar(x=list(frames), y=list(frames.values()), name="calls", marker_color=COLOURS["exact"]))
    return finish(figure, "Calls by length", "frames of the call", "calls (log)", source, bargap=0).update_yaxes(log_axis(frames.values()))


def profile_curves(frame: pd.DataFrame, source: str, batch: int = 1) -> go.Figure:
    """Milliseconds of a call by its length, eager, by replay and by compiled replay, with their spread.

    Args:
        frame: `Profile.to_frame()`: batch, frames, how, ms, spread.
        source: device, date, measured or recorded.
        batch: rows of the call.
    """
    go, figure = plotly(), plotly().Figure()
    for how, name, colour in (("eager", "eager", "eager"), ("plain", "replay", "replay"), ("compiled", "compiled", "compiled")):
        rows = frame[(frame["batch"] == batch) & (frame["how"] == how)]
        if len(rows):
            bars, look = {"type": "data", "array": rows["spread"] / 2}, {"line": {"color": COLOURS[colour]}, "mode": "lines+markers"}
            figure.add_trace(go.Scatter(x=rows["frames"], y=rows["ms"], error_y=bars, name=name, **look))
    title = f"What a call of {batch} row{'s' * (batch > 1)} takes"
    figure = finish(figure, title, "frames of the call", "ms a call, median and quartiles", source, showlegend=True)
    return figure.update_yaxes(rangemode="tozero")


def speedup_curves(frame: pd.DataFrame, source: str) -> go.Figure:
    """How many times as long an eager call takes as its replay, by the frames of all its rows: at 1 a graph saves nothing.

    Args:
        frame: `Profile.to_frame()`: batch, frames, how, ms, speedup.
        source: device, date, measured or recorded.
    """
    go, figure, np = plotly(), plotly().Figure(), need("numpy")
    replays = frame[(frame["how"] == "plain") & frame["speedup"].notna()]
    looks = zip(cycle(dict.fromkeys(COLOURS.values())), cycle(("circle", "square", "diamond", "cross", "x", "triangle-up")), strict=False)
    for batch, (colour, symbol) in zip(sorted(set(replays["batch"].tolist())), looks, strict=False):
        rows = replays[replays["batch"] == batch]
        each = zip(*(rows[name].tolist() for name in ("frames", "ms", "speedup")), strict=True)
        told = [f"{batch}x{frames}: {ms * times:.3g} ms eager, {ms:.3g} by replay" for frames, ms, times in each]
        look = {"line": {"color": colour, "width": 1.5}, "marker": {"symbol": symbol, "size": 7}, "mode": "lines+markers"}
        x, y = batch * rows["frames"], rows["speedup"]
        name = f"{batch} row{'s' * (batch > 1)}"
        figure.add_trace(go.Scatter(x=x, y=y, name=name, customdata=told, hovertemplate="%{customdata}<extra></extra>", **look))
    figure.add_hline(y=1, line={"dash": "dot", "color": "#555"})
    work = np.append(replays["batch"] * replays["frames"], 1)
    title = "Where graphs stop paying: eager over replay"
    figure = finish(figure, title, "frames of the call, all rows together (log)", "times as long eagerly", source, showlegend=True)
    return figure.update_xaxes(log_axis(work)).update_yaxes(rangemode="tozero")


def budget_curve(frame: pd.DataFrame, source: str, baseline: str = "heuristic") -> go.Figure:
    """Expected milliseconds of a call by the memory that a plan takes: plans for several budgets, and a star for the baseline.

    Args:
        frame: a row for each plan: name, pool_bytes, ms, graphs, hit_rate; the one named as the baseline stands apart.
        source: device, date, measured or recorded times.
        baseline: name of the row to compare with.
    """
    go, figure = plotly(), plotly().Figure()
    own, plans = frame[frame["name"] == baseline], frame[frame["name"] != baseline].sort_values("pool_bytes")
    star = {"symbol": "star", "size": 16, "color": COLOURS["fallback"]}
    for name, rows, look in (
        ("plans for a budget", plans, {"mode": "lines+markers", "line": {"color": COLOURS["replay"]}}),
        (baseline, own, {"mode": "markers", "marker": star}),
    ):
        told = [f"{r.name}: {r.graphs} graphs, {r.hit_rate:.1%} hits" for r in rows.itertuples(index=False)]
        text = "%{customdata}<br>%{x:,.0f} MiB, %{y:.3g} ms<extra></extra>"
        figure.add_trace(go.Scatter(x=rows["pool_bytes"] / 2**20, y=rows["ms"], name=name, customdata=told, hovertemplate=text, **look))
    figure.add_hline(y=float(own["ms"].iloc[0]), line={"dash": "dot", "color": COLOURS["fallback"], "width": 1})
    title = "What memory buys"
    figure = finish(figure, title, "MiB of the pool (log)", "expected ms a call", source, showlegend=True)
    figure.update_xaxes(log_axis(frame["pool_bytes"] / 2**20)).update_yaxes(rangemode="tozero")
    return figure.update_layout(legend={"orientation": "h", "y": -0.2})
