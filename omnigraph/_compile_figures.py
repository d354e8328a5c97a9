"""Figures of a replay's kernels, of what compiling takes, and of the other ways to make the same call."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

from omnigraph._drawing import COLOURS, finish, log_axis, plotly

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


def kernels_by_time(frame: pd.DataFrame, source: str, most: int = 12) -> go.Figure:
    """Microseconds of a replay by kernel, the longest of each bucket, and the gaps between kernels.

    Args:
        frame: `recorded.kernels(...).frame`: bucket, kernel, kind, count, us, replay_us.
        source: device, date, recorded.
        most: kernels drawn for each bucket.
    """
    go, figure = plotly(), plotly().Figure()
    buckets = list(dict.fromkeys(frame["bucket"]))
    palette = dict(zip(frame["kind"].unique(), cycle([*dict.fromkeys(COLOURS.values()), "#F0E442", "#444444"])))
    for kind, rows in frame.groupby("kind", sort=False):
        summed = rows.groupby("bucket", sort=False)[["us", "count"]].sum()
        top = {bucket: ", ".join(part.nlargest(3, "us")["kernel"].str.slice(0, 60)) for bucket, part in rows.groupby("bucket")}
        told = [f"{count:.0f} kernels<br>{top[bucket]}" for bucket, count in zip(summed.index, summed["count"], strict=True)]
        bar = go.Bar(y=summed.index, x=summed["us"], name=str(kind), orientation="h", customdata=told)
        figure.add_trace(bar.update(marker_color=palette[kind], hovertemplate="%{x:,.0f} µs, %{customdata}"))
    whole = frame.groupby("bucket", sort=False).agg(us=("us", "sum"), replay=("replay_us", "first"))
    gaps = (whole["replay"] - whole["us"]).clip(lower=0)
    figure.add_trace(go.Bar(y=gaps.index, x=gaps, name="between kernels", orientation="h", marker_color="#D9D9D9"))
    figure = finish(figure, "Where the time of a replay goes", "µs of a replay", "", source, barmode="stack", showlegend=True)
    figure.update_yaxes(categoryorder="array", categoryarray=buckets[::-1], automargin=True)
    return figure.update_layout(height=240 + 40 * len(buckets), legend={"orientation": "h", "y": -0.25})


def compile_seconds(frame: pd.DataFrame, source: str) -> go.Figure:
    """Seconds until the first result of each length, by the way of compiling; hatched: stopped without one.

    Args:
        frame: `recorded.compile_study(...).frame`: variant, shape, seconds, graphs, stopped_after_s, replay_ms.
        source: device, date, recorded.
    """
    go, figure = plotly(), plotly().Figure()
    shapes = [shape for shape in dict.fromkeys(frame["shape"]) if shape is not None and shape == shape]
    for shape, colour in zip(shapes, cycle(dict.fromkeys(COLOURS.values()))):
        rows = frame[frame["shape"] == shape]
        told = [f"{graphs:.0f} graphs compiled" for graphs in rows["graphs"]]
        bar = go.Bar(y=rows["variant"], x=rows["seconds"], name=str(shape), orientation="h", customdata=told, marker_color=colour)
        figure.add_trace(bar.update(text=rows["seconds"].map("{:.1f}".format), textangle=0, hovertemplate="%{x:.1f} s, %{customdata}"))
    stopped = frame[frame["stopped_after_s"].notna()].drop_duplicates("variant")
    if len(stopped):
        look = {"color": "#D9D9D9", "pattern": {"shape": "/"}}
        name = "stopped, not finished"
        figure.add_trace(go.Bar(y=stopped["variant"], x=stopped["stopped_after_s"], name=name, orientation="h", marker=look))
    figure = finish(figure, "What compiling takes", "s until the first result of each length", "", source, barmode="stack", showlegend=True)
    figure.update_yaxes(categoryorder="array", categoryarray=list(dict.fromkeys(frame["variant"]))[::-1], automargin=True)
    return figure.update_layout(height=240 + 30 * frame["variant"].nunique(), legend={"orientation": "h", "y": -0.25})


def beside(frame: pd.DataFrame, source: str) -> go.Figure:
    """Milliseconds of a call by every way one could take, a group a shape.

    Args:
        frame: `SpeedBench.beside`: shape, way, ms, q1, q3, start_s.
        source: device, date, recorded.
    """
    go, figure = plotly(), plotly().Figure()
    palette = cycle([COLOURS[name] for name in ("memory", "padded", "replay", "compiled", "split")])
    for way, rows in frame.groupby("way", sort=False):
        spread = {"type": "data", "symmetric": False, "array": rows["q3"] - rows["ms"], "arrayminus": rows["ms"] - rows["q1"]}
        told = [f"{way}, first result after {start:.2f} s" for start in rows["start_s"]]
        bar = go.Bar(x=rows["shape"], y=rows["ms"], error_y=spread, name=str(way), customdata=told, text=rows["ms"].map("{:.1f}".format))
        figure.add_trace(
            bar.update(marker_color=COLOURS["eager"] if way == "eager" else next(palette), hovertemplate="%{y:.2f} ms, %{customdata}")
        )
    title = "The same call by other ways"
    figure = finish(
        figure, title, "call (batch x frames)", "ms a call (log), median and quartiles", source, barmode="group", showlegend=True
    )
    figure.update_xaxes(type="category").update_yaxes(log_axis(frame["ms"]))
    return figure.update_layout(legend={"orientation": "h", "y": -0.2})
