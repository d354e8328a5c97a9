"""Figures of errors: how far replays, and chunks, are from what they stand for."""

from __future__ import annotations

import math
from itertools import cycle
from typing import TYPE_CHECKING

from omnigraph._drawing import COLOURS, ERRORS, finish, plotly

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


def error_map(frame: pd.DataFrame, source: str) -> go.Figure:
    """The error of each call against the reference, over batch and frames; in a cell "=" or how many times eager's own error.

    Args:
        frame: `Comparison.to_frame()`: batch, frames, bitwise, error, eager_error, bucket, ok. Of equal shapes the worst is shown.
        source: device, date, measured or recorded.
    """
    go = plotly()
    frame = frame.sort_values("error", na_position="last").drop_duplicates(["batch", "frames"], keep="last")
    times = (frame["error"] / frame["eager_error"]).map("{:.2f}".format).where(~frame["bitwise"], "=")
    cells = frame.assign(times=times, log=[round(math.log10(e), 4) if e > 0 else math.nan for e in frame["error"]])
    batches, lengths = sorted(cells["batch"].unique()), sorted(cells["frames"].unique())
    x, y = [str(n) for n in lengths], [str(n) for n in batches]
    grid = cells.set_index(["batch", "frames"]).reindex([(batch, length) for batch in batches for length in lengths])
    grid["times"] = grid["times"].fillna("")
    z, text, bucket, error = (grid[name].to_numpy().reshape(len(y), len(x)) for name in ("log", "times", "bucket", "error"))
    known = cells["log"].dropna()
    low, high = (math.floor(known.min()), max(math.ceil(known.max()), math.floor(known.min()) + 1)) if len(known) else (0, 1)
    ticks = [digit * 10.0**power for power in range(low, high) for digit in (1, 2, 5)] + [10.0**high]
    bar = {
        "title": {"text": "relative error (log)", "side": "right"},
        "tickvals": [math.log10(t) for t in ticks],
        "ticktext": [f"{t:g}" for t in ticks],
    }
    figure = go.Figure(
        go.Heatmap(
            x=x,
            y=y,
            z=z,
            text=text,
            texttemplate="%{text}",
            textfont={"color": "black"},
            customdata=[list(zip(*row, strict=True)) for row in zip(bucket, error, strict=True)],
            hovertemplate="%{y}x%{x} by %{customdata[0]}<br>error %{customdata[1]:.3g}, %{text} eager's<extra></extra>",
            colorscale=ERRORS,
            zmin=low,
            zmax=high,
            colorbar=bar,
            xgap=2,
            ygap=2,
        )
    )
    wrong = cells[~cells["ok"]]
    if len(wrong):
        marker = {"symbol": "square-open", "size": 30, "line": {"width": 3}, "color": "black"}
        where = {"x": wrong["frames"].astype(str), "y": wrong["batch"].astype(str)}
        figure.add_trace(go.Scatter(**where, name="not as eager", mode="markers", marker=marker, showlegend=True, hoverinfo="skip"))
    title = "Error by shape (= bitwise as eager, else times eager's own error)"
    figure = finish(figure, title, "frames of the call", "batch (rows)", source).update_layout(legend={"orientation": "h", "y": -0.2})
    for axis, names in ((figure.update_xaxes, x), (figure.update_yaxes, y)):
        axis(type="category", categoryorder="array", categoryarray=names, showgrid=False)
    return figure


def snr_by_frame(frame: pd.DataFrame, source: str) -> go.Figure:
    """Signal to noise against eager for each frame of a call, a line for each decoder; equal samples are drawn at 160 dB.

    Args:
        frame: decoder (a name), frame, snr_db.
        source: device, date, measured or recorded.
    """
    go, figure = plotly(), plotly().Figure()
    looks = cycle(zip(("replay", "memory", "fallback", "split", "compiled"), ("circle", "square", "diamond", "cross", "x"), strict=True))
    for n, ((name, part), (colour, symbol)) in enumerate(zip(frame.groupby("decoder", sort=False), looks, strict=False)):
        look = {"line": {"color": COLOURS[colour]}, "marker": {"symbol": symbol, "size": max(14 - 2 * n, 6)}}
        figure.add_trace(go.Scatter(x=part["frame"], y=part["snr_db"].clip(upper=160), name=str(name), mode="lines+markers", **look))
    figure = finish(figure, "Signal to noise, frame by frame", "frame of the call", "SNR against eager, dB (160: equal)", source)
    return figure.update_yaxes(dtick=20).update_layout(legend={"orientation": "h", "y": -0.2})


def error_by_context(frame: pd.DataFrame, source: str, *, receptive_field: int | None = None, floor: float | None = None) -> go.Figure:
    """How far chunks are from a full decode, by the left context that each decodes again.

    Args:
        frame: dtype, context in frames, error relative to the full decode of that dtype, snr_db.
        source: device, date, measured or recorded.
        receptive_field: a line where the context covers it.
        floor: a line at what rounding alone makes of a full decode.
    """
    go, figure = plotly(), plotly().Figure()
    for (dtype, part), (colour, size) in zip(frame.groupby("dtype"), cycle([("memory", 13), ("replay", 7)])):
        hover = "%{x} frames: %{y:.2g}, %{customdata:.1f} dB"
        curve = {"x": part["context"], "y": part["error"], "customdata": part["snr_db"], "hovertemplate": hover}
        figure.add_trace(go.Scatter(**curve, name=str(dtype), line={"color": COLOURS[colour]}, marker={"size": size}, mode="lines+markers"))
    if receptive_field is not None:
        text = f"receptive field: {receptive_field} frames"
        figure.add_vline(x=receptive_field, line={"dash": "dot", "color": "#555"}, annotation={"text": text})
    if floor is not None:
        figure.add_hline(y=floor, line={"dash": "dot", "color": "#555"})
        where = {"x": 1, "xref": "paper", "xanchor": "right", "y": math.log10(floor), "yanchor": "bottom"}
        figure.add_annotation(**where, text="a full decode's own rounding", showarrow=False)
    low, high = (math.floor(math.log10(e)) for e in (min(frame["error"].min(), floor or 1), frame["error"].max()))
    ticks = [digit * 10.0**power for power in range(low, high + 1) for digit in ((1, 2, 5) if high - low < 3 else (1,))]
    y = "error relative to a full decode (log)"
    figure = finish(figure, "Error by left context", "left context (frames)", y, source, showlegend=True)
    return figure.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
