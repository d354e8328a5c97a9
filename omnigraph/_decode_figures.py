"""Figures of decode graphs, and what was recorded of them on a GPU (`data/prefix/`)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omnigraph._drawing import COLOURS, finish, plotly
from omnigraph._files import read_json
from omnigraph.models.qwen_bench import to_frame
from omnigraph.recorded import source_of

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

SCHEMA = "omnigraph.bench.prefix/1"
_WAYS = {
    "eager_ms": ("eager", COLOURS["eager"], "solid"),
    "step_ms": ("target tokens alone, no graph", COLOURS["memory"], "dot"),
    "graph_ms": ("graph", COLOURS["replay"], "solid"),
    "compiled_ms": ("compiled blocks in the graph", COLOURS["compiled"], "solid"),
    "contention_refresh_ms": ("refresh: both by graph, copied in turn", COLOURS["replay"], "solid"),
    "contention_eager_ms": ("eager: one by graph, one eager", COLOURS["eager"], "solid"),
    "copy_ms": ("one copy of the prefix", COLOURS["memory"], "dot"),
}


@dataclass(frozen=True)
class PrefixBench:
    """What `data/prefix/measure.py` saved: `steps` by target tokens, `contention` by prefix length, `memory` by entry."""

    content: dict[str, Any]

    @property
    def source(self) -> str:
        return source_of(self.content["provenance"])

    @property
    def steps(self) -> pd.DataFrame:
        frame = to_frame(self.content["steps"])
        return frame.assign(ratio=frame["eager_ms"] / frame["graph_ms"])

    @property
    def contention(self) -> pd.DataFrame:
        frame = to_frame(self.content["contention"])
        return frame.assign(saved_ms=frame["contention_eager_ms"] - frame["contention_refresh_ms"])

    @property
    def memory(self) -> pd.DataFrame:
        return to_frame(self.content["memory"])

    @property
    def summary(self) -> str:
        host, steps, memory = self.content["host"], self.content["steps"], self.memory
        compiled = [row for row in steps if "compiled_error" in row]
        off = ((memory["bytes"] - memory["device_bytes"]).abs() / memory["device_bytes"].clip(lower=1)).max()
        lines = [
            f"{sum(self.content['bitwise'])} of {len(self.content['bitwise'])} steps of a guided run bitwise equal to eager",
            f"{host['beyond_us']:.0f} microseconds of host time beyond copies and replay, for {host['layers']} layers",
            f"memory by entry within {off:.1%} of what the device has less",
        ]
        if compiled:
            worst = max(row["compiled_error"] / row["eager_error"] for row in compiled)
            took = [row["compile_s"] for row in compiled]
            lines.append(f"compiled: at most {worst:.2f} times eager's error; {min(took):.0f} to {max(took):.0f} s to compile a key")
        return "\n".join(lines)


def prefix_bench(path: str | os.PathLike[str]) -> PrefixBench:
    """Load the results of `data/prefix/measure.py`.

    Raises:
        FileError: another schema.
    """
    return PrefixBench(read_json(path, SCHEMA))


def _lines(frame: pd.DataFrame, x: str, ways: tuple[str, ...]) -> go.Figure:
    go, figure = plotly(), plotly().Figure()
    for way in ways:
        if way in frame:
            name, colour, dash = _WAYS[way]
            part = frame[frame[way].notna()]
            middle = part[way]
            bars = {"type": "data", "symmetric": False, "array": part[f"{way}_q3"] - middle, "arrayminus": middle - part[f"{way}_q1"]}
            line = {"color": colour, "dash": dash}
            figure.add_trace(go.Scatter(x=part[x], y=middle, name=name, mode="lines+markers", line=line, error_y=bars))
    ticks, round_numbers = sorted(set(frame[x])), [digit * 10.0**power for power in range(-3, 4) for digit in (1, 2, 5)]
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks])
    return figure.update_yaxes(type="log", tickvals=round_numbers, ticktext=[f"{number:g}" for number in round_numbers])


def step_times(frame: pd.DataFrame, source: str) -> go.Figure:
    """Milliseconds of a denoising step over the target tokens: eager, uncaptured, by graph, by graph with compiled blocks.

    Args:
        frame: `qwen_bench.to_frame(step_times(...))`: target, and x_ms with its quartiles for each way measured.
        source: device, date, measured or recorded.
    """
    figure = _lines(frame, "target", ("eager_ms", "step_ms", "graph_ms", "compiled_ms"))
    return finish(figure, "A denoising step", "target tokens", "ms a step, median and quartiles", source)


def contention_times(frame: pd.DataFrame, target: int, source: str) -> go.Figure:
    """Milliseconds of a step when two live requests take turns on one key, over the prefix length, for one number of target tokens.

    Args:
        frame: `qwen_bench.to_frame(contention_times(...))`: target, prefix, and x_ms with its quartiles.
        source: device, date, measured or recorded.
    """
    figure = _lines(frame[frame["target"] == target], "prefix", ("contention_eager_ms", "contention_refresh_ms", "copy_ms"))
    return finish(figure, f"Two requests on one key, {target} target tokens", "prefix tokens", "ms a step, mean of both requests", source)


def memory_by_entry(frame: pd.DataFrame, source: str) -> go.Figure:
    """MiB of each entry: its buffers, and what its capture added to the pool that all share.

    Args:
        frame: `DecodeGraphCache.to_frame()`.
        source: device, date, measured or recorded.
    """
    go = plotly()
    names = [f"{row.branch} {row.batch}x{row.prefix_tokens}<br>{row.layout}" for row in frame.itertuples()]
    buffers, added = frame["mib"] - frame["graph_mib"], frame["graph_mib"]
    figure = go.Figure(
        [
            go.Bar(y=names, x=buffers, name="buffers: prefix copy, latents", orientation="h", marker_color=COLOURS["replay"]),
            go.Bar(y=names, x=added, name="added to the shared pool", orientation="h", marker_color=COLOURS["memory"]),
        ]
    )
    return finish(figure, "Memory by entry", "MiB", "", source, barmode="stack").update_yaxes(automargin=True)


def outcomes_by_key(frame: pd.DataFrame, source: str) -> go.Figure:
    """How the steps of each key were served: by replay, or eagerly and why.

    Args:
        frame: `DecodeGraphCache.stats.to_frame()`.
        source: device, date, measured or recorded.
    """
    go, figure = plotly(), plotly().Figure()
    served = frame["reason"].where(frame["kind"] == "fallback", "replayed")
    for kind, part in frame.assign(served=served).groupby("served"):
        colour = COLOURS["exact"] if kind == "replayed" else None
        figure.add_trace(go.Bar(y=part["call"], x=part["calls"], name=str(kind), orientation="h", marker_color=colour))
    return finish(figure, "How steps were served", "steps", "", source, barmode="stack").update_yaxes(automargin=True)
