"""The figures of a panel: one widget whose only state is what it shows, so that a reloaded page shows the same."""

from __future__ import annotations

import json
from collections.abc import Iterable
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets
from plotly.offline import get_plotlyjs

if TYPE_CHECKING:
    import plotly.graph_objects as go

_RENDER = """
function render({ model, el }) {
  const grid = document.createElement("div");
  grid.className = "omnigraph-plots";
  el.append(grid);
  const draw = () => {
    const figures = model.get("figures").map((text) => JSON.parse(text));
    while (grid.children.length > figures.length) {
      Plotly.purge(grid.lastChild);
      grid.lastChild.remove();
    }
    while (grid.children.length < figures.length) grid.append(document.createElement("div"));
    figures.forEach(({ data, layout: { height, ...layout } }, at) => {
      grid.children[at].style.height = `${height}px`; // a resize forgets the layout's own height
      Plotly.react(grid.children[at], data, { ...layout, autosize: true }, { displaylogo: false });
    });
  };
  // Drawn before the page gives it room, a figure would keep plotly's own width.
  const room = new ResizeObserver(() => [...grid.children].forEach((plot) => plot.offsetWidth && plot.data && Plotly.Plots.resize(plot)));
  room.observe(grid);
  // Not every browser takes Enter in a field without a form for a change: then the panel's fields of tags would not take it either.
  const enter = ({ key, target }) => {
    if (key === "Enter" && target.matches?.(".omnigraph-panel .jupyter-widget-taginput")) target.dispatchEvent(new Event("change"));
  };
  document.addEventListener("keydown", enter);
  model.on("change:figures", draw);
  draw();
  return () => {
    document.removeEventListener("keydown", enter);
    room.disconnect();
    model.off("change:figures", draw);
    [...grid.children].forEach((plot) => Plotly.purge(plot));
  };
}
export default { render };
"""


class Plots(anywidget.AnyWidget):
    """Plotly figures in as many columns as fit. plotly.js comes with the widget, out of the plotly package: no request is made."""

    # A module of its own: within it plotly.js finds `module`, as in Node, and not whatever loader the page has.
    _esm = f"const module = {{ exports: {{}} }}, exports = module.exports;\n{get_plotlyjs()}\nconst Plotly = module.exports;\n{_RENDER}"
    _css = """
    .omnigraph-plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 8px; }
    .omnigraph-panel td, .omnigraph-panel th { padding: 1px 10px; line-height: 1.4; }
    .omnigraph-plots > div { min-width: 0; border: 1px solid #ddd; border-radius: 4px; background: white; overflow: hidden; }
    """
    figures: Any = traitlets.List(traitlets.Unicode()).tag(sync=True)

    def show(self, figures: Iterable[go.Figure]) -> None:
        """Show these instead."""
        self.figures = [_narrow(figure) for figure in figures]


def _narrow(figure: go.Figure) -> str:
    """A figure as JSON, its heading broken into lines that fit half a page, with room for them."""
    content = json.loads(figure.to_json())
    layout = content["layout"]
    heading, source = layout["title"], layout["title"].get("subtitle", {})
    lines = wrap(heading["text"], 50), wrap(source.get("text", "").replace("<br>", " "), 66)
    heading |= {
        "text": "<br>".join(lines[0]),
        "font": {"size": 15},
        "x": 0.02,
        "y": 1,
        "yref": "container",
        "yanchor": "top",
        "pad": {"t": 12 + 6 * (len(lines[0]) - 1)},
    }
    heading["subtitle"] = source | {"text": "<br>".join(lines[1])}
    height, more = layout.get("height", 420), 20 * (len(lines[0]) - 1) + 14 * max(len(lines[1]) - 1, 0)
    layout |= {"height": height + more, "margin": layout.get("margin", {}) | {"t": layout.get("margin", {}).get("t", 80) + more}}
    return json.dumps(content)
