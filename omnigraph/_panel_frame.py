"""The frame of a panel: buttons, messages, bars, the choice of a view, the figures; and how they are put together."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as w

from omnigraph._panel_controls import text_of
from omnigraph._panel_fields import BAD, Bar, dispose
from omnigraph._panel_plots import Plots

LIVE_BUTTONS = ("Apply", "Cancel", "Measure now", "Play")
BUTTONS = {
    "Apply": ("capture this plan in the decoder, then time calls of the trace", "primary"),
    "Cancel": ("stop what is under way; the decoder keeps what it had", "warning"),
    "Measure now": ("measure the decoder's times on this device", ""),
    "Play": ("decode the trace when its requests arrive, at the load set", ""),
    "Export": ("write the plan to the file", ""),
    "Close": ("close the panel and free what it holds", ""),
}


class Frame:
    """All widgets of a panel but its fields, which it takes as a box.

    Args:
        fields: the box of fields.
        views: what can be shown.
        live: whether there is a decoder to do things to.
    """

    def __init__(self, fields: Any, views: list[str], live: bool) -> None:
        self.bar, self.job_bar, self.plots = Bar(), Bar(), Plots()
        self.message, self.summary, self.error, self.played = w.HTML(), w.HTML(), w.HTML(), w.HTML()
        self.view = w.ToggleButtons(options=views, value=views[0], style={"button_width": "auto"})
        self.path = w.Text("plan.json", description="File", style={"description_width": "initial"}, layout=w.Layout(width="220px"))
        self.buttons = {
            name: w.Button(description=name, tooltip=tip, button_style=style, layout=w.Layout(width="auto"))
            for name, (tip, style) in BUTTONS.items()
            if live or name not in LIVE_BUTTONS
        }
        wrapped = {"flex_flow": "row wrap", "align_items": "center"}
        *first, export, close = self.buttons.values()
        row = w.HBox([*first, self.path, export, close], layout=w.Layout(margin="6px 0", **wrapped))
        shown = w.HBox([self.view, self.bar.box], layout=w.Layout(**wrapped))
        parts = [fields, row, self.job_bar.box, self.message, self.error, self.summary, shown, self.played, self.plots]
        self.root = w.VBox(parts, layout=w.Layout(width="100%"))
        self.root.add_class("omnigraph-panel")
        self.busy(False)

    def on_click(self, name: str, do: Callable[[], object]) -> None:
        """Have a button do something; its errors are shown in the panel."""

        def clicked(_: Any) -> None:
            try:
                do()
            except Exception as error:
                self.refuse(error)

        if name in self.buttons:
            self.buttons[name].on_click(clicked)

    def busy(self, at_work: bool) -> None:
        """Enable the buttons that make sense while something is done to the decoder, or those while nothing is."""
        for name, button in self.buttons.items():
            button.disabled = name in ("Apply", "Measure now") if at_work else name == "Cancel"
        if not at_work:
            self.job_bar.hide()

    def say(self, text: str) -> None:
        """What came of a button."""
        self.message.value = f'<div style="line-height:1.3">{escape(text)}</div>' if text else ""

    def refuse(self, error: BaseException) -> None:
        """What went wrong with a button."""
        self.message.value = _red(error)

    def fail(self, error: BaseException) -> None:
        """Why what is entered cannot be shown; `figures` takes it back."""
        self.error.value = _red(error)

    def figures(self, summary: str, played: str, figures: Any) -> None:
        """Show these."""
        self.summary.value, self.played.value, self.error.value = summary, played, ""
        self.plots.show(figures)

    def close(self) -> None:
        """Close all widgets."""
        dispose(self.root)


def _red(error: BaseException) -> str:
    return f'<div style="{BAD}"><b>{text_of(error)}</b></div>'
