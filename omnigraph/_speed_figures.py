"""Figures of speed: what bounds a call, what is reached, where the time goes, and what compiling takes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

from omnigraph._drawing import COLOURS, finish, log_axis, plotly
from omnigraph._needs import need

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

_SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up")
_WAYS = {"eager_ms": ("eager", "eager"), "decode_ms": ("replay", "replay"), "compiled_ms": ("compiled replay", "compiled")}


@dataclass(frozen=True)
class Peaks:
    """What a device does at most, by its datasheet: operations and bytes a second."""

    name: str
    flops: float
    bytes: float


# NVIDIA H200 Tensor Core GPU datasheet, SXM: bfloat16 1,979 TFLOPS with sparsity, half of it dense; HBM3e 4.8 TB/s.
H200_BF16 = Peaks("H200, bfloat16 dense", 989.5e12, 4.8e12)


def roofline(frame: pd.DataFrame, peaks: Peaks, source: str) -> go.Figure:
    """Operations a second that calls reach, over their operations for each byte that eager moves; the roof is what the device can.

    Args:
        frame: a row a shape: shape, flops, bytes, and eager_ms, decode_ms, compiled_ms where measured.
        peaks: the device's, `H200_BF16` for instance.
        source: where counts and times are from.
    """
    go, figure, np = plotly(), plotly().Figure(), need("numpy")
    at = frame["flops"] / frame["bytes"]
    x = np.geomspace(at.min() / 2, max(at.max() * 2, 2 * peaks.flops / peaks.bytes), 60)
    roof = {"color": "black", "width": 1}
    figure.add_trace(go.Scatter(x=x, y=np.minimum(x * peaks.bytes, peaks.flops) / 1e12, name=peaks.name, mode="lines", line=roof))
    for way, symbol in zip(_WAYS, _SYMBOLS, strict=False):
        if way in frame:
            name, colour = _WAYS[way]
            rows = frame[frame[way].notna()]
            told = [f"{shape}: {ms:.3g} ms" for shape, ms in zip(rows["shape"], rows[way], strict=True)]
            marker = {"color": COLOURS[colour], "symbol": symbol, "size": 9}
            look = {"mode": "markers", "marker": marker, "customdata": told, "hovertemplate": "%{customdata}, %{y:.3g} TFLOP/s"}
            figure.add_trace(go.Scatter(x=rows["flops"] / rows["bytes"], y=rows["flops"] / rows[way] / 1e9, name=name, **look))
    ends = frame.iloc[[0, -1]] if len(frame) > 1 else frame
    best = ends["flops"] / ends[[way for way in _WAYS if way in frame]].min(axis=1) / 1e9
    label = {"text": list(ends["shape"]), "textposition": "top center", "showlegend": False, "hoverinfo": "skip"}
    figure.add_trace(go.Scatter(x=ends["flops"] / ends["bytes"], y=best * 1.15, mode="text", **label))
    x_title = "operations for each byte moved op by op (log)"
    figure = finish(figure, "Roofline of a call", x_title, "TFLOP/s (log)", source, showlegend=True)
    reached = [(frame["flops"] / frame[way]).min() / 1e9 for way in _WAYS if way in frame]
    return (
        figure.update_xaxes(log_axis(x))
        .update_yaxes(log_axis([min(reached) / 2, peaks.flops / 1e12]))
        .update_layout(legend={"orientation": "h", "y": -0.2})
    )


def time_bounds(frame: pd.DataFrame, peaks: Peaks, source: str) -> go.Figure:
    """Milliseconds that calls take beside the least that operations and bytes would let them.

    Args:
        frame: a row a shape: shape, flops, bytes, bytes_fused, bytes_least, and eager_ms, decode_ms, compiled_ms where measured.
        peaks: the device's.
        source: where counts and times are from.
    """
    go, figure = plotly(), plotly().Figure()
    bounds = {
        "all operations, at the device's peak": 1e3 * frame["flops"] / peaks.flops,
        "all bytes as eager moves them": 1e3 * frame["bytes"] / peaks.bytes,
        "bytes with all else fused into convolutions and products": 1e3 * frame["bytes_fused"] / peaks.bytes,
        "weights, codes and audio alone": 1e3 * frame["bytes_least"] / peaks.bytes,
    }
    for way, symbol in zip(_WAYS, _SYMBOLS, strict=False):
        if way in frame:
            name, colour = _WAYS[way]
            look = {"mode": "markers", "marker": {"color": COLOURS[colour], "symbol": symbol, "size": 10}}
            figure.add_trace(go.Scatter(x=frame["shape"], y=frame[way], name=name, **look))
    for (name, values), dash in zip(bounds.items(), ("solid", "dash", "dot", "dashdot"), strict=True):
        line = {"color": "black", "width": 1.5, "dash": dash}
        figure.add_trace(go.Scatter(x=frame["shape"], y=values, name=name, mode="lines", line=line))
    times = [value for way in _WAYS if way in frame for value in frame[way].dropna()]
    title = "What calls take, and what would bound them"
    figure = finish(figure, title, "call (batch x frames)", "ms a call (log)", source, showlegend=True)
    figure.update_xaxes(type="category").update_yaxes(log_axis([*times, *bounds["weights, codes and audio alone"]]))
    return figure.update_layout(height=520, legend={"orientation": "h", "y": -0.2})


def bytes_by_kind(frame: pd.DataFrame, source: str) -> go.Figure:
    """Of what memory traffic a call is made, as eager runs it: what compiling can fuse is all but convolutions, products and attention.

    Args:
        frame: `recorded.work(...).frame`: shape, and x_bytes and x_ops for each kind x of operation.
        source: where the counts are from.
    """
    go, figure = plotly(), plotly().Figure()
    names = {"convolution": "exact", "product": "padded", "attention": "split", "other": "memory"}
    whole = sum(frame[f"{kind}_bytes"] for kind in names)
    for kind, colour in names.items():
        share = 100 * frame[f"{kind}_bytes"] / whole
        told = frame[f"{kind}_ops"].map("{:.0f} operations".format)
        name = "all else: activations, pads, copies, norms" if kind == "other" else kind
        bar = go.Bar(x=frame["shape"], y=share, name=name, customdata=told, hovertemplate="%{y:.1f} %, %{customdata}")
        figure.add_trace(bar.update(marker_color=COLOURS[colour]))
    title = "Memory traffic of an eager call"
    figure = finish(figure, title, "call (batch x frames)", "% of the bytes read and written", source, barmode="stack")
    return figure.update_xaxes(type="category").update_layout(legend={"orientation": "h", "y": -0.2})


def cost_per_frame(frame: pd.DataFrame, source: str) -> go.Figure:
    """Microseconds for each frame decoded, over the frames of all rows of a call: eager, and by replay for each batch size.

    Args:
        frame: `Profile.to_frame()`: batch, frames, how, ms.
        source: device, date, measured or recorded.
    """
    go, figure = plotly(), plotly().Figure()
    for how, colour, dash in (("eager", "eager", "dot"), ("plain", "replay", "solid"), ("compiled", "compiled", "solid")):
        symbols = cycle(_SYMBOLS)
        for batch in sorted(set(frame[frame["how"] == how]["batch"].tolist())):
            rows = frame[(frame["how"] == how) & (frame["batch"] == batch)]
            work = rows["batch"] * rows["frames"]
            name = f"{ {'plain': 'replay'}.get(how, how) }, {batch} row{'s' * (batch > 1)}"
            told = [f"{batch}x{frames}: {ms:.3g} ms" for frames, ms in zip(rows["frames"], rows["ms"], strict=True)]
            marker = {"symbol": next(symbols), "size": 6}
            look = {"mode": "lines+markers", "line": {"color": COLOURS[colour], "width": 1.2, "dash": dash}, "marker": marker}
            figure.add_trace(
                go.Scatter(x=work, y=1e3 * rows["ms"] / work, name=name, customdata=told, hovertemplate="%{customdata}", **look)
            )
    work = frame["batch"] * frame["frames"]
    title = "What a frame costs, by the frames decoded together"
    figure = finish(figure, title, "frames of the call, all rows together (log)", "µs a frame (log)", source, showlegend=True)
    return figure.update_xaxes(log_axis(work)).update_yaxes(log_axis(1e3 * frame["ms"] / work)).update_layout(height=520)


def host_costs(frame: pd.DataFrame, source: str) -> go.Figure:
    """Microseconds of host time of single calls: the bare copies and replays, and the library's call around them.

    Args:
        frame: `SpeedBench.host`: group, name, us, q1, q3.
        source: device, date, measured or recorded.
    """
    go, figure = plotly(), plotly().Figure()
    for bare, colour in ((True, "memory"), (False, "replay")):
        rows = frame[(frame["name"] == "bare") == bare]
        names = [
            f"{name}<br>{group}" if name != "bare" else f"bare<br>{group}" for name, group in zip(rows["name"], rows["group"], strict=True)
        ]
        spread = {"type": "data", "symmetric": False, "array": rows["q3"] - rows["us"], "arrayminus": rows["us"] - rows["q1"]}
        look = {"orientation": "h", "error_x": spread, "text": rows["us"].map("{:,.0f}".format), "marker_color": COLOURS[colour]}
        name = "bare copies and replays" if bare else "the library's call"
        figure.add_trace(go.Bar(x=rows["us"], y=names, name=name, textposition="inside", insidetextanchor="start", **look))
    figure = finish(figure, "Host time of a call", "µs, median and quartiles (log)", "", source, showlegend=True)
    order = [f"{name}<br>{group}" for name, group in zip(frame["name"], frame["group"], strict=True)][::-1]
    figure.update_xaxes(log_axis(frame["us"])).update_yaxes(categoryorder="array", categoryarray=order, automargin=True)
    return figure.update_layout(height=180 + 40 * len(frame), legend={"orientation": "h", "y": -0.12})
