"""Figures from DataFrames: each a plain `plotly` figure with units on its axes and the source of its numbers under its title."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from textwrap import wrap
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
ERRORS = ["#FFF8E5", "#E69F00", "#D55E00"]  # darker is larger, and black text can be read on all of it


def _go() -> Any:
    return need("plotly.graph_objects")


def _finish(figure: go.Figure, title: str, x: str, y: str, source: str, **more: Any) -> go.Figure:
    """Title with the source of the numbers under it, and axes with units."""
    heading = {"text": title, "subtitle": {"text": "<br>".join(wrap(source, 90)), "font": {"size": 11, "color": "#555"}}}
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
    figure = _finish(figure, title, "frames of the call", "batch (rows)", source).update_layout(legend={"orientation": "h", "y": -0.2})
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
    looks = cycle(zip(("replay", "memory", "fallback", "split", "compiled"), ("circle", "square", "diamond", "cross", "x"), strict=True))
    for n, ((name, part), (colour, symbol)) in enumerate(zip(frame.groupby("decoder", sort=False), looks, strict=False)):
        look = {"line": {"color": COLOURS[colour]}, "marker": {"symbol": symbol, "size": max(14 - 2 * n, 6)}}
        figure.add_trace(go.Scatter(x=part["frame"], y=part["snr_db"].clip(upper=160), name=str(name), mode="lines+markers", **look))
    figure = _finish(figure, "Signal to noise, frame by frame", "frame of the call", "SNR against eager, dB (160: equal)", source)
    return figure.update_yaxes(dtick=20).update_layout(legend={"orientation": "h", "y": -0.2})


def seams(frame: pd.DataFrame, joints: Sequence[int], source: str) -> go.Figure:
    """Audio around the joints of chunks, which are dashed lines.

    Args:
        frame: a curve a column, by sample number.
        joints: the first sample of each later chunk.
        source: what was decoded, measured or recorded.
    """
    go, figure = _go(), _go().Figure()
    for name, colour in zip(frame.columns, cycle([COLOURS["replay"], COLOURS["eager"]])):
        figure.add_trace(go.Scatter(x=frame.index, y=frame[name].round(4), name=name, mode="lines", line={"width": 1.5, "color": colour}))
    for joint in joints:
        figure.add_vline(x=joint, line={"dash": "dash", "width": 1, "color": "#555"})
    figure = _finish(figure, "Audio and the joints of its chunks (dashed)", "sample", "amplitude", source, showlegend=True)
    return figure.update_xaxes(tickformat=",d").update_yaxes(rangemode="tozero").update_layout(legend={"orientation": "h", "y": -0.2})


def error_by_context(frame: pd.DataFrame, source: str, *, receptive_field: int | None = None, floor: float | None = None) -> go.Figure:
    """How far chunks are from a full decode, by the left context that each decodes again.

    Args:
        frame: dtype, context in frames, error relative to the full decode of that dtype, snr_db.
        source: device, date, measured or recorded.
        receptive_field: a line where the context covers it.
        floor: a line at what rounding alone makes of a full decode.
    """
    go, figure = _go(), _go().Figure()
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
    figure = _finish(figure, "Error by left context", "left context (frames)", y, source, showlegend=True)
    return figure.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])


def packing(frame: pd.DataFrame, source: str) -> go.Figure:
    """Decoder calls as rows, the windows in them as blocks, coloured by request; what is decoded for nothing is grey.

    Args:
        frame: a row a window: way (a panel each), call (a number within the way), batch, length (the bucket's, in frames), row (of the
            window in its call), frames (of the window), request.
        source: where the requests are from.
    """
    go, ways = _go(), list(frame.groupby("way", sort=False))
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
    figure = _finish(figure, title, "", "", source, barmode="overlay")
    figure.update_xaxes(title="frames decoded, row after row of the batch", row=len(ways), col=1)
    return figure.update_layout(height=180 + 18 * sum(heights), margin={"t": 110}, legend={"title": "request of"})


def first_audio(frame: pd.DataFrame, source: str) -> go.Figure:
    """Compute time to a stream's first audio, its codes being there, by the ramp of its first chunks.

    Args:
        frame: ramp, way ("eager" or "graphs"), first_ms and its _q1, _q3.
        source: device, date, measured or recorded.
    """
    go, figure = _go(), _go().Figure()
    for way, part in frame.groupby("way", sort=False):
        middle = part["first_ms"]
        bars = {"type": "data", "symmetric": False, "array": part["first_ms_q3"] - middle, "arrayminus": middle - part["first_ms_q1"]}
        look = {"marker_color": COLOURS["eager" if way == "eager" else "replay"], "text": middle.map("{:.1f}".format)}
        figure.add_trace(
            go.Bar(x=part["ramp"], y=middle, error_y=bars, name=str(way), textposition="inside", insidetextanchor="start", **look)
        )
    x = "ramp (frames of the first chunks, before those of 25)"
    figure = _finish(figure, "Compute time to first audio", x, "ms, median and quartiles", source)
    return figure.update_xaxes(type="category")
