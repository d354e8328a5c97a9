"""Figures of calls: how they were served, and what they took."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from omnigraph._drawing import COLOURS, KINDS, colours_of, finish, kinds_of, log_axis, percent, plotly
from omnigraph._needs import need

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

LENGTHS, TEXTS = 100, 20  # columns of a map at most, and at most to write in their cells
POINTS, DRAWN = 401, 1000  # of a curve, and calls of a kind on a timeline, at most


def latency_by_shape(frame: pd.DataFrame, source: str) -> go.Figure:
    """Milliseconds of a call by its shape, eager beside the decoder, with quartiles.

    Args:
        frame: `Driven.to_frame()`: shape, kind, calls, eager_ms, decode_ms and their _q1, _q3.
        source: device, date, measured or recorded.
    """
    go, figure = plotly(), plotly().Figure()
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
    figure = finish(figure, "Latency by shape", "call (batch x frames)", "ms a call (log), median and quartiles", source)
    return figure.update_yaxes(log_axis([*frame["eager_ms"], *frame["decode_ms"]])).update_xaxes(type="category")


def outcomes_by_frames(frame: pd.DataFrame, source: str) -> go.Figure:
    """How the calls of each length were served: exact, padded, split or eager, stacked.

    Args:
        frame: `ReplayStats.to_frame()`: frames, kind, calls.
        source: device, date, measured or recorded.
    """
    go, figure = plotly(), plotly().Figure()
    counts = frame.groupby(["kind", "frames"], as_index=False)["calls"].sum()
    for kind in ("exact", "padded", "split", "fallback"):
        part = counts[counts["kind"] == kind]
        if len(part):
            figure.add_trace(go.Bar(x=part["frames"].astype(str), y=part["calls"], name=kind, marker_color=COLOURS[kind]))
    figure = finish(figure, "How calls were served", "frames of the call", "calls", source, barmode="stack")
    lengths = [str(n) for n in sorted(counts["frames"].unique())]
    return figure.update_xaxes(type="category", categoryorder="array", categoryarray=lengths)


def hit_map(frame: pd.DataFrame, source: str) -> go.Figure:
    """How the calls of each batch and length are served, in colour; in a cell the share of hits, where there is room.

    Over 100 lengths are put together in steps; a cell then has the colour of most of its calls.

    Args:
        frame: `ReplayStats.to_frame()`, or `Prediction.calls`: batch, frames, kind, compiled, calls.
        source: device, date, measured, recorded or predicted.
    """
    go, pd, lengths = plotly(), need("pandas"), frame["frames"].astype(int)
    step = 1 if lengths.nunique() <= LENGTHS else -(-int(lengths.max()) // LENGTHS)
    rows = frame.assign(served=kinds_of(frame), upto=-(-lengths // step) * step, batch=frame["batch"].astype(int))
    counts = rows.pivot_table(index=["batch", "upto"], columns="served", values="calls", aggfunc="sum", fill_value=0)
    counts = counts.reindex(columns=list(KINDS), fill_value=0)
    batches, ends = sorted(rows["batch"].unique()), sorted(rows["upto"].unique())
    counts = counts.reindex(pd.MultiIndex.from_product([batches, ends]), fill_value=0)
    calls = counts.sum(axis=1)
    hits = (100 * (calls - counts["fallback"]) // calls.clip(lower=1)).map("{:d}%".format)  # rounded down: 100% is all of them
    told = [", ".join(f"{n:,} {kind}" for kind, n in row.items() if n) for row in counts.to_dict("records")]
    grid = (len(batches), len(ends))
    z = counts.to_numpy().argmax(axis=1).astype(float)
    z[calls.to_numpy() == 0] = math.nan
    x, y = [f"{n - step + 1}-{n}" if step > 1 else str(n) for n in ends], [str(n) for n in batches]
    figure = go.Figure(
        go.Heatmap(
            x=x,
            y=y,
            z=z.reshape(grid),
            text=hits.where(calls > 0, "").to_numpy().reshape(grid),
            texttemplate="%{text}" if len(x) <= TEXTS else None,
            customdata=pd.Series(told).to_numpy().reshape(grid),
            hovertemplate="%{y}x%{x}: %{text} hits<br>%{customdata}<extra></extra>",
            colorscale=[[(i + j) / len(KINDS), COLOURS[kind]] for i, kind in enumerate(KINDS) for j in (0, 1)],
            zmin=-0.5,
            zmax=len(KINDS) - 0.5,
            showscale=False,
            xgap=1,
            ygap=1,
        )
    )
    for kind in (kind for kind in KINDS if counts[kind].any()):
        marker = {"color": COLOURS[kind], "symbol": "square", "size": 12}
        figure.add_trace(go.Scatter(x=[None], y=[None], name=kind, mode="markers", marker=marker, showlegend=True))
    title = f"How calls are served: {percent(calls.sum() - counts['fallback'].sum(), calls.sum())} by replays"
    figure = finish(figure, title, "frames of the call", "batch (rows)", source)
    for axis, names in ((figure.update_xaxes, x), (figure.update_yaxes, y)):
        axis(type="category", categoryorder="array", categoryarray=names, showgrid=False)
    return figure


def latency_distribution(frame: pd.DataFrame, source: str) -> go.Figure:
    """Which share of the calls takes at most so long, a line for each way, with its percentiles.

    Args:
        frame: way ("eager" or another name), ms, calls (how many took that long), as `Prediction.latency` has them.
        source: device, date, measured, recorded or predicted.
    """
    go, figure, np = plotly(), plotly().Figure(), need("numpy")
    for (way, part), colour in zip(frame.groupby("way", sort=False), colours_of(frame["way"].unique()), strict=True):
        counts = part.groupby("ms")["calls"].sum()
        ms, seen = counts.index.to_numpy(), counts.to_numpy().cumsum()
        at = np.searchsorted(seen, np.array([0.5, 0.95, 0.99]) * seen[-1])
        name = f"{way}: {', '.join(f'{q} {ms[i]:.3g}' for q, i in zip(('p50', 'p95', 'p99'), at, strict=True))} ms"
        line = np.unique(np.searchsorted(seen, np.linspace(0, 1, POINTS) * seen[-1]))
        share, look = 100 * seen / seen[-1], {"name": name, "legendgroup": str(way), "hovertemplate": "%{y:.1f} % within %{x:.3g} ms"}
        x, y = np.append(ms[0], ms[line]), np.append(0.0, share[line])
        figure.add_trace(go.Scatter(x=x, y=y, mode="lines", line={"color": colour, "shape": "hv"}, **look))
        marker = {"color": colour, "size": 9, "symbol": ["circle", "square", "diamond"]}
        figure.add_trace(go.Scatter(x=ms[at], y=[50, 95, 99], mode="markers", marker=marker, showlegend=False, **look))
    figure = finish(figure, "How long calls take", "ms a call (log); marks at p50, p95, p99", "calls that take at most that, %", source)
    figure.update_layout(legend={"orientation": "h", "y": -0.32}).update_xaxes(log_axis(frame["ms"]))
    return figure.update_yaxes(tickvals=[0, 25, 50, 75, 95, 99], range=[0, 104])


def call_timeline(frame: pd.DataFrame, source: str) -> go.Figure:
    """Calls as they come: when, how long each takes, and in colour how it was served. Of a kind, 1,000 are drawn at most.

    Args:
        frame: `Served.to_frame("calls")`: start, ms, batch, frames, kind, compiled, bucket, reason.
        source: device, date, measured, recorded or simulated.
    """
    go, figure, served = plotly(), plotly().Figure(), kinds_of(frame)
    for kind, symbol in zip(KINDS, ("circle", "diamond", "square", "cross", "x"), strict=True):
        part = frame[served == kind]
        if not len(part):
            continue
        step = -(-len(part) // DRAWN)
        name = f"{kind} ({len(part):,})" if step == 1 else f"{kind} (1 in {step} of {len(part):,})"
        some = part.iloc[::step]
        told = some["bucket"].where(some["kind"] != "fallback", some["reason"])
        names = some["batch"].astype(str) + "x" + some["frames"].astype(str) + ": " + told
        marker = {"color": COLOURS[kind], "symbol": symbol, "size": 6, "opacity": 0.7}
        text = "%{x:.2f} s, %{customdata}<br>%{y:.3g} ms<extra></extra>"
        figure.add_trace(
            go.Scatter(x=some["start"], y=some["ms"], name=name, mode="markers", marker=marker, customdata=names, hovertemplate=text)
        )
    figure = finish(figure, "Calls over time", "start of the call (seconds)", "ms a call", source, showlegend=True)
    return figure.update_yaxes(rangemode="tozero").update_layout(legend={"orientation": "h", "y": -0.2})
