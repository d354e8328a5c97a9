"""What all figures share: colours, and how a figure is finished."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
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
KINDS = ("exact", "padded", "split", "compiled", "fallback")


def plotly() -> Any:
    return need("plotly.graph_objects")


@cache
def _style() -> Any:
    """Plotly's white template without its part for each kind of trace, which is most of what drawing a small figure takes."""
    return plotly().layout.Template(layout=need("plotly.io").templates["plotly_white"].layout)


def finish(figure: go.Figure, title: str, x: str, y: str, source: str, **more: Any) -> go.Figure:
    """Title with the source of the numbers under it, and axes with units."""
    heading = {"text": title, "subtitle": {"text": "<br>".join(wrap(source, 90)), "font": {"size": 11, "color": "#555"}}}
    margin = {"t": 80, "b": 60, "l": 70, "r": 20}
    return figure.update_layout(
        title=heading, xaxis_title=x, yaxis_title=y, template=_style(), height=420, margin=margin, legend={"orientation": "v"}, **more
    )


def kinds_of(frame: pd.DataFrame) -> pd.Series[str]:
    """Which of `KINDS` each row is: its `kind`, or "compiled" where it is `compiled`, however it fits."""
    return frame["kind"].mask(frame["compiled"].astype(bool), "compiled")


def colours_of(names: Iterable[object]) -> list[str]:
    """A colour for each name: "eager" has its own, the others take turns."""
    others = cycle(COLOURS[name] for name in ("replay", "split", "memory", "compiled", "padded"))
    return [COLOURS["eager"] if name == "eager" else next(others) for name in names]


def log_axis(values: Iterable[float]) -> dict[str, Any]:
    """A logarithmic axis for positive `values`, with round numbers on it: the fewer of each decade, the more decades there are."""
    known = [value for value in values if 0 < value < math.inf]
    low, high = (min(known), max(known)) if known else (1.0, 10.0)
    digits = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if high < 4 * low else (1, 2, 5) if high < 1000 * low else (1,)
    ticks = [digit * 10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for digit in digits]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def percent(part: float, whole: float) -> str:
    """A share, rounded down: 100.0% is all of it.

    >>> percent(9_999, 10_000), percent(3, 3)
    ('99.9%', '100.0%')
    """
    return f"{math.floor(1000 * part / whole) / 10:.1f}%"
