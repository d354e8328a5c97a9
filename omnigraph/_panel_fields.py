"""Pieces of the panel: a control with label, hint and refusal, a progress bar, and the end of them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from typing import Any

import ipywidgets as w

BAD = "color:#B3261E"


class Field:
    """A control with its label and hint; `value` is its last entry that could be read, and a refused one says why beside it.

    Args:
        control: any widget with a `value`.
        read: what the control's value means; raises ValueError with the reason where it cannot mean anything.
        changed: called when `value` has become another one by the user's doing.
    """

    def __init__(
        self,
        control: Any,
        label: str,
        hint: str,
        read: Callable[[Any], Any] = lambda value: value,
        changed: Callable[[], object] | None = None,
    ) -> None:
        self.control, self.read, self.changed = control, read, changed
        self.value = read(control.value)
        self.problem = w.HTML()
        control.layout.width = "auto"
        told = w.HTML(
            f'<div style="line-height:1.25"><b>{escape(label)}</b> <span style="color:#666;font-size:90%">{escape(hint)}</span></div>'
        )
        told.layout.margin = self.problem.layout.margin = "0"
        self.box = w.VBox([told, control, self.problem])
        self.box.layout.margin = "0 0 6px 0"
        self.box.add_class("omnigraph-field")
        control.observe(self._entered, "value")

    def _entered(self, change: dict[str, Any]) -> None:
        try:
            value = self.read(change["new"])
        except Exception as error:  # a file that is gone, too: nobody else would see it
            self.refuse(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            return
        self.problem.value = ""
        if value is not self.value and value != self.value:
            self.value = value
            if self.changed is not None:
                self.changed()

    def refuse(self, reason: str) -> None:
        """Say beside the field why its entry is not taken."""
        self.problem.value = f'<div style="{BAD};line-height:1.25">Refused: {escape(reason)}. Nothing was changed.</div>'

    def show(self, entry: Any) -> None:
        """Set the control to what the program found; that is no change by the user."""
        self.value = self.read(entry)
        self.problem.value = ""
        self.control.value = entry


class Bar:
    """A progress bar with words beside it; not to be seen while nothing is under way."""

    def __init__(self) -> None:
        self.bar = w.FloatProgress(min=0.0, max=1.0, layout=w.Layout(width="220px"))
        self.text = w.HTML()
        self.box = w.HBox([self.bar, self.text], layout=w.Layout(display="none"))

    def show(self, what: str, done: int, total: int) -> None:
        self.bar.value = done / max(total, 1)
        self.text.value = f"{escape(what)} ({done:,} of {total:,})" if total > 1 else f"{escape(what)} ..."
        self.box.layout.display = "flex"

    def hide(self) -> None:
        self.box.layout.display = "none"
        self.text.value = ""


def titled(title: str, *boxes: Any) -> Any:
    """A group of fields."""
    head = w.HTML(f'<div style="font-size:110%;border-bottom:1px solid #999">{escape(title)}</div>')
    return w.VBox([head, *boxes], layout=w.Layout(padding="0 8px", min_width="0"))


def tree(root: Any) -> Iterator[Any]:
    """A widget and all that it is made of, layouts and styles too: each has a comm of its own."""
    seen, waiting = set[int](), [root]
    while waiting:
        widget = waiting.pop()
        if id(widget) in seen:
            continue
        seen.add(id(widget))
        values = [getattr(widget, name, None) for name in widget.keys]
        waiting += [
            part for value in values for part in (value if isinstance(value, list | tuple) else [value]) if isinstance(part, w.Widget)
        ]
        yield widget


def dispose(root: Any) -> None:
    """Close a widget and all that it is made of, and forget who observes them."""
    for widget in list(tree(root)):
        widget.unobserve_all()
        widget.close()
