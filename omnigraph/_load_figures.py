"""Figures of plans under load: what a listener notices."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

from omnigraph._drawing import COLOURS, KINDS, colours_of, finish, log_axis, plotly
from omnigraph._needs import need

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


def service_by_load(frame: pd.DataFrame, source: str) -> go.Figure:
    """Time to first audio (p95) and requests whose playback stalls, against load; open marks where the decoder is saturated.

    Args:
        frame: `load_curve(...)`: load, plan, first_audio_p50, first_audio_p95, underrun_share, saturated.
        source: trace, device, date, measured or recorded times.
    """
    go = plotly()
    figure = need("plotly.subplots").make_subplots(1, 2, horizontal_spacing=0.2)
    plans = frame.groupby("plan", sort=False)
    symbols = cycle(("circle", "square", "diamond", "cross", "triangle-up"))
    for (name, part), colour, symbol in zip(plans, colours_of(frame["plan"].unique()), symbols, strict=False):
        part = part.sort_values("load")
        marks = [f"{symbol}-open" if saturated else symbol for saturated in part["saturated"]]
        look = {"mode": "lines+markers", "name": str(name), "legendgroup": str(name), "line": {"color": colour}}
        look |= {"marker": {"symbol": marks, "size": 9, "color": colour}}
        half = "%{y:.3g} s (p50 %{customdata:.3g} s)"
        first = go.Scatter(x=part["load"], y=part["first_audio_p95"], customdata=part["first_audio_p50"], hovertemplate=half, **look)
        figure.add_trace(first, 1, 1)
        stalled = go.Scatter(x=part["load"], y=100 * part["underrun_share"], hovertemplate="%{y:.3g} %", showlegend=False, **look)
        figure.add_trace(stalled, 1, 2)
    x = "load (times the arrivals)"
    title = "Service under load (open marks: saturated)"
    figure = finish(figure, title, x, "seconds to first audio, p95 (log)", source, showlegend=True)
    figure.update_xaxes(title=x, rangemode="tozero").update_yaxes(log_axis(frame["first_audio_p95"]), row=1, col=1)
    figure.update_yaxes(title="requests with an underrun, %", rangemode="tozero", row=1, col=2)
    return figure.update_layout(legend={"orientation": "h", "y": -0.2})


def predicted_against_measured(frame: pd.DataFrame, source: str) -> go.Figure:
    """Milliseconds of each shape as predicted and as measured: on the line, they agree.

    Args:
        frame: shape, kind, calls, predicted_ms, measured_ms and its _q1, _q3.
        source: where both are from.
    """
    go, figure = plotly(), plotly().Figure()
    times = frame[["predicted_ms", "measured_ms"]].to_numpy()
    ends = [times.min() / 1.2, times.max() * 1.2]
    figure.add_trace(go.Scatter(x=ends, y=ends, name="as predicted", mode="lines", line={"color": "black", "dash": "dot", "width": 1}))
    for kind, symbol in zip(KINDS, ("circle", "diamond", "square", "cross", "x"), strict=True):
        part = frame[frame["kind"] == kind]
        if len(part):
            middle = part["measured_ms"]
            bars = {"type": "data", "symmetric": False, "thickness": 1}
            bars |= {"array": part["measured_ms_q3"] - middle, "arrayminus": middle - part["measured_ms_q1"]}
            text = "%{customdata[0]}: predicted %{x:.3g} ms, measured %{y:.3g} ms<br>%{customdata[1]} calls"
            told = {"customdata": part[["shape", "calls"]], "hovertemplate": text}
            marker = {"color": COLOURS[kind], "symbol": symbol, "size": 9}
            figure.add_trace(go.Scatter(x=part["predicted_ms"], y=middle, error_y=bars, name=kind, mode="markers", marker=marker, **told))
    off = (frame["measured_ms"] / frame["predicted_ms"] * frame["calls"]).sum() / frame["calls"].sum()
    title = f"Predicted and measured: a call takes {off:.2f} times what was predicted"
    figure = finish(figure, title, "ms a call, predicted (log)", "ms a call, measured (log), quartiles", source, showlegend=True)
    return figure.update_xaxes(log_axis(ends)).update_yaxes(log_axis(ends))
