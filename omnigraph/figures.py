"""Figures from DataFrames: each a plain `plotly` figure with units on its axes and the source of its numbers under its title."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from omnigraph._needs import need

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

# Okabe and Ito's colours, told apart by colour-blind readers too.
COLOURS = {
    "eager": "#D55E00",
    "replay": "#0072B2",
    "exact": "#0072B2",
    "padded": "#56B4E9",
    "split": "#009E73",
    "compiled": "#CC79A7",
    "fallback": "#D55E00",
    "memory": "#E69F00",
}


def _go() -> Any:
    return need("plotly.graph_objects")


def _finish(figure: go.Figure, title: str, x: str, y: str, source: str, **more: Any) -> go.Figure:
    """Title with the source of the numbers under it, and axes with units."""
    heading = {"text": title, "subtitle": {"text": source, "font": {"size": 11, "color": "#555"}}}
    margin = {"t": 80, "b": 60, "l": 70, "r": 20}
    return figure.update_layout(
        title=heading, xaxis_title=x, yaxis_title=y, template="plotly_white", height=420, margin=margin, legend={"orientation": "v"}, **more
    )


def latency_by_shape(frame: pd.DataFrame, source: str) -> go.Figure:
    """Milliseconds of a call by its shape, eager beside the decoder, with quartiles.

    Args:
        frame: `Driven.to_frame()`: shape, kind, calls, eager_ms, decode_ms and their _q1, _q3.
        source: device, date, measured or recorded.
    """
    go, figure = _go(), _go().Figure()
    for name, column, colour in (("eager", "eager_ms", "eager"), ("through the decoder", "decode_ms", "replay")):
        middle = frame[column]
        bars = {"type": "data", "symmetric": False, "array": frame[f"{column}_q3"] - middle, "arrayminus": middle - frame[f"{column}_q1"]}
        figure.add_trace(
            go.Scatter(
                x=frame["shape"],
                y=middle,
                name=name,
                mode="markers",
                error_y=bars,
                marker={"size": 9, "color": COLOURS[colour]},
                customdata=frame[["kind", "bucket", "calls"]],
                hovertemplate="%{x}: %{y:.2f} ms<br>%{customdata[0]}, %{customdata[1]}<br>%{customdata[2]} calls",
            )
        )
    figure = _finish(figure, "Latency by shape", "call (batch x frames)", "ms a call (log), median and quartiles", source)
    return figure.update_yaxes(type="log", dtick="D2").update_xaxes(type="category")


def outcomes_by_frames(frame: pd.DataFrame, source: str) -> go.Figure:
    """How the calls of each length were served: exact, padded, split or eager, stacked.

    Args:
        frame: `ReplayStats.to_frame()`: frames, kind, calls.
        source: device, date, measured or recorded.
    """
    go, figure = _go(), _go().Figure()
    counts = frame.groupby(["kind", "frames"], as_index=False)["calls"].sum()
    for kind in ("exact", "padded", "split", "fallback"):
        part = counts[counts["kind"] == kind]
        if len(part):
            figure.add_trace(go.Bar(x=part["frames"].astype(str), y=part["calls"], name=kind, marker_color=COLOURS[kind]))
    figure = _finish(figure, "How calls were served", "frames of the call", "calls", source, barmode="stack")
    lengths = [str(n) for n in sorted(counts["frames"].unique())]
    return figure.update_xaxes(type="category", categoryorder="array", categoryarray=lengths)


def memory_by_bucket(frame: pd.DataFrame, source: str) -> go.Figure:
    """What each bucket's capture added to the pool that all share, in the order of capture.

    Args:
        frame: `CaptureReport.to_frame()`: captured, mib.
        source: device, date, measured or recorded.
    """
    go = _go()
    taken = frame[frame["captured"] != ""]
    figure = go.Figure(go.Bar(x=taken["captured"], y=taken["mib"], marker_color=COLOURS["memory"], name="added to the pool"))
    return _finish(figure, "Memory by bucket", "bucket (batch x frames), in order of capture", "MiB added to the shared pool", source)


def error_map(frame: pd.DataFrame, source: str) -> go.Figure:
    """The error of each call against the reference, over batch and frames; in a cell "=" or how many times eager's own error.

    Args:
        frame: `Comparison.to_frame()`: batch, frames, bitwise, error, eager_error, bucket, ok. Of equal shapes the worst is shown.
        source: device, date, measured or recorded.
    """
    go = _go()
    frame = frame.sort_values("error", na_position="last").drop_duplicates(["batch", "frames"], keep="last")
    times = (frame["error"] / frame["eager_error"]).map("{:.2f}".format).where(~frame["bitwise"], "=")
    cells = frame.assign(times=times, log=[math.log10(e) if e > 0 else math.nan for e in frame["error"]])
    batches, lengths = sorted(cells["batch"].unique()), sorted(cells["frames"].unique())
    x, y = [str(n) for n in lengths], [str(n) for n in batches]
    grid = cells.set_index(["batch", "frames"]).reindex([(batch, length) for batch in batches for length in lengths])
    z, text, bucket, error = (grid[name].to_numpy().reshape(len(y), len(x)) for name in ("log", "times", "bucket", "error"))
    known = cells["log"].dropna()
    low, high = (math.floor(known.min()), max(math.ceil(known.max()), math.floor(known.min()) + 1)) if len(known) else (0, 1)
    ticks = [digit * 10.0**power for power in range(low, high) for digit in (1, 2, 5)] + [10.0**high]
    bar = {"title": "relative<br>error (log)", "tickvals": [math.log10(t) for t in ticks], "ticktext": [f"{t:g}" for t in ticks]}
    figure = go.Figure(
        go.Heatmap(
            x=x,
            y=y,
            z=z,
            text=text,
            texttemplate="%{text}",
            customdata=[list(zip(*row, strict=True)) for row in zip(bucket, error, strict=True)],
            hovertemplate="%{y}x%{x} by %{customdata[0]}<br>error %{customdata[1]:.3g}, %{text} eager's<extra></extra>",
            colorscale="Cividis",
            zmin=low,
            zmax=high,
            colorbar=bar,
            xgap=2,
            ygap=2,
        )
    )
    wrong = cells[~cells["ok"]]
    if len(wrong):
        marker = {"symbol": "square-open", "size": 30, "line": {"width": 3}, "color": COLOURS["fallback"]}
        where = {"x": wrong["frames"].astype(str), "y": wrong["batch"].astype(str)}
        figure.add_trace(go.Scatter(**where, name="not as eager", mode="markers", marker=marker, showlegend=True, hoverinfo="skip"))
    title = "Error by shape (= bitwise as eager, else times eager's own error)"
    figure = _finish(figure, title, "frames of the call", "batch (rows)", source).update_layout(
        legend={"orientation": "h", "y": 1.1, "x": 0.8}
    )
    for axis, names in ((figure.update_xaxes, x), (figure.update_yaxes, y)):
        axis(type="category", categoryorder="array", categoryarray=names, showgrid=False)
    return figure


def snr_by_frame(frame: pd.DataFrame, source: str) -> go.Figure:
    """Signal to noise against eager for each frame of a call, a line for each decoder; equal samples are drawn at 160 dB.

    Args:
        frame: decoder (a name), frame, snr_db.
        source: device, date, measured or recorded.
    """
    go, figure = _go(), _go().Figure()
    looks = zip(("replay", "memory", "fallback", "split", "compiled"), ("circle", "square", "diamond", "cross", "x"), strict=True)
    for (name, part), (colour, symbol) in zip(frame.groupby("decoder", sort=False), looks, strict=False):
        look = {"line": {"color": COLOURS[colour]}, "marker": {"symbol": symbol, "size": 8}}
        figure.add_trace(go.Scatter(x=part["frame"], y=part["snr_db"].clip(upper=160), name=str(name), mode="lines+markers", **look))
    figure = _finish(figure, "Signal to noise, frame by frame", "frame of the call", "SNR against eager, dB (160: equal)", source)
    return figure.update_yaxes(dtick=20).update_layout(legend={"orientation": "h", "y": -0.2})
