"""The dashboard: change the buckets, see the hit rates and the latency, try them on a decoder."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from omnigraph._needs import need
from omnigraph.decoder import GraphedDecoder
from omnigraph.profile import Profile
from omnigraph.trace import Trace

if TYPE_CHECKING:
    from omnigraph._panel import Panel

_shown: list[tuple[str, str, Panel]] = []  # cell, run of it, panel


def explore(decoder: GraphedDecoder | None = None, trace: Trace | None = None, profile: Profile | None = None) -> Panel:
    """A panel of controls and figures: what a plan would do to a trace's calls, and, on a decoder, what it does.

    In a notebook, a cell that ends with it shows it. `Apply` captures the plan in `decoder` and times calls; `Export` writes the plan.
    Running the cell again closes the panel that it showed before; so does `panel.close()`.

    Args:
        decoder: without one, everything is predicted.
        trace: without one, the first of `data/traces/`, or a made-up one. A CSV can be uploaded in the panel.
        profile: times of the decoder's device, or of another. Without one, the panel measures `decoder` when asked to.

    Raises:
        ModuleNotFoundError: ipywidgets, anywidget, plotly or pandas is missing; the text holds the command.
    """
    for name in ("ipywidgets", "anywidget", "plotly", "pandas", "numpy"):
        need(name)
    from omnigraph._panel import Panel  # late: it builds on ipywidgets

    if (now := _cell()) is None:
        return Panel(decoder, trace, profile)
    for cell, run, panel in _shown:
        if cell == now[0] and run != now[1]:
            panel.close()
    panel = Panel(decoder, trace, profile)
    _shown[:] = [*(shown for shown in _shown if not shown[2].closed), (*now, panel)]
    return panel


def _cell() -> tuple[str, str] | None:
    """The notebook cell that is being run, and which run of it this is; None elsewhere."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    parent: dict[str, Any] = getattr(getattr(shell, "kernel", None), "get_parent", dict)()
    cell, run = parent.get("metadata", {}).get("cellId"), parent.get("header", {}).get("msg_id")
    return (str(cell), str(run)) if cell and run else None
