"""Figures of chunks: where they join, how they share calls, when the first is heard."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from omnigraph._drawing import COLOURS, finish, plotly
from omnigraph._needs import need

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


def seams(frame: pd.DataFrame, joints: Sequence[int], source: str) -> go.Figure:
    """Audio around the joints of chunks, which are dashed lines.

    Args:
        frame: a curve a column, by sample number.
        joints: the first sample of each later chunk.
        source: what was decoded, measured or recorded.
    """
    go, figure = plotly(), plotly().Figure()
    for name, colour in zip(frame.columns, cycle([COLOURS["replay"], COLOURS["eager"]])):
        figure.add_trace(go.Scatter(x=frame.index, y=frame[name].round(4), name=name, mode="lines", line={"width": 1.5, "color": colour}))
    for joint in joints:
        figure.add_vline(x=joint, line={"dash": "dash", "width": 1, "color": "#555"})
    figure = finish(figure, "Audio and the joints of its chunks (dashed)", "sample", "amplitude", source, showlegend=True)
    return figure.update_xaxes(tickformat=",d").update_yaxes(rangemode="tozero").update_layout(legend={"orientation": "h", "y": -0.2})


def packing(frame: pd.DataFrame, source: str) -> go.Figure:
    """Decoder calls as rows, the windows in them as blocks, coloured by request; what is decoded for nothing is grey.

    Args:
        frame: a row a window: way (a panel each), call (a number within the way), batch, length (the bucket's, in frames), row (of the
            window in its call), frames (of the window), request.
        source: where the requests are from.
    """
    go, ways = plotly(), list(frame.groupby("way", sort=False))
    heads = []
    for way, part in ways:
        calls = part.drop_duplicates("call")
        heads.append(f"{way}: {len(calls)} calls, {(calls['batch'] * calls['length']).sum():,} frames decoded for {part['frames'].sum():,}")
    heights = [part["call"].nunique() + 1 for _, part in ways]
    make = need("plotly.subplots").make_subplots
    figure = make(len(ways), 1, shared_xaxes=True, subplot_titles=heads, row_heights=heights, vertical_spacing=0.08)
    palette = dict(zip(frame["request"].unique(), cycle([*dict.fromkeys(COLOURS.values()), "#F0E442", "#444444"])))
    for at, (_, part) in enumerate(ways, 1):
        calls = part.drop_duplicates("call")
        whole = go.Bar(x=calls["batch"] * calls["length"], y=calls["call"], name="padding", marker_color="#D9D9D9", legendgroup="padding")
        figure.add_trace(whole, at, 1)
        for request, blocks in part.groupby("request", sort=False):
            bar = go.Bar(x=blocks["frames"], base=blocks["row"] * blocks["length"], y=blocks["call"], name=str(request))
            figure.add_trace(bar.update(marker_color=palette[request], legendgroup=str(request)), at, 1)
        names = calls["batch"].astype(str) + "x" + calls["length"].astype(str)
        figure.update_yaxes(autorange="reversed", tickvals=calls["call"], ticktext=names, row=at, col=1)
    figure.update_traces(orientation="h", width=0.85, marker_line={"width": 1, "color": "white"}, showlegend=False)
    figure.update_traces(showlegend=True, row=1, col=1)
    title = "Windows in decoder calls"
    figure = finish(figure, title, "", "", source, barmode="overlay")
    figure.update_xaxes(title="frames decoded, row after row of the batch", row=len(ways), col=1)
    return figure.update_layout(height=180 + 18 * sum(heights), margin={"t": 110}, legend={"title": "request of"})


def first_audio(frame: pd.DataFrame, source: str) -> go.Figure:
    """Compute time to a stream's first audio, its codes being there, by the ramp of its first chunks.

    Args:
        frame: ramp, way ("eager" or "graphs"), first_ms and its _q1, _q3.
        source: device, date, measured or recorded.
    """
    go, figure = plotly(), plotly().Figure()
    for way, part in frame.groupby("way", sort=False):
        middle = part["first_ms"]
        bars = {"type": "data", "symmetric": False, "array": part["first_ms_q3"] - middle, "arrayminus": middle - part["first_ms_q1"]}
        look = {"marker_color": COLOURS["eager" if way == "eager" else "replay"], "text": middle.map("{:.1f}".format)}
        figure.add_trace(
            go.Bar(x=part["ramp"], y=middle, error_y=bars, name=str(way), textposition="inside", insidetextanchor="start", **look)
        )
    x = "ramp (frames of the first chunks, before those of 25)"
    figure = finish(figure, "Compute time to first audio", x, "ms, median and quartiles", source)
    return figure.update_xaxes(type="category")
