"""A panel of `og.explore` on a page: its fields by label, its buttons by name, what it says and draws."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Locator, expect

FIGURES = "plots => plots.map(p => JSON.stringify([p.layout.title.text, p.data.map(t => [t.name, t.x, t.y, t.z])]))"


@dataclass
class OnPage:
    """The panel at `root`."""

    root: Locator

    def field(self, label: str) -> Locator:
        return self.root.locator(".omnigraph-field", has=self.root.page.locator("b", has_text=re.compile(f"^{re.escape(label)}$")))

    def enter(self, label: str, text: str) -> None:
        """Type into a text field or a field of tags, whose entry shows when one clicks where there is no tag."""
        entry, tags = self.field(label).locator("input").last, self.field(label).locator(".jupyter-widget-tagsinput")
        if tags.count():
            box = tags.bounding_box()
            assert box is not None
            tags.click(position={"x": box["width"] - 4, "y": box["height"] - 4})
        entry.fill("")
        entry.press_sequentially(text)
        entry.press("Enter")

    def choose(self, label: str, option: str) -> None:
        self.field(label).locator("select").select_option(option)

    def press(self, button: str) -> None:
        self.root.get_by_role("button", name=button, exact=True).click()

    def drag(self, label: str, share: float, moves: int) -> None:
        """Drag a slider's handle to a share of its length, in so many moves of the mouse."""
        mouse, handle = self.root.page.mouse, self.field(label).locator(".noUi-handle")
        handle.scroll_into_view_if_needed()
        start, track = handle.bounding_box(), self.field(label).locator(".noUi-base").bounding_box()
        assert start is not None and track is not None
        x, y = start["x"] + start["width"] / 2, start["y"] + start["height"] / 2
        mouse.move(x, y)
        mouse.down()
        for i in range(1, moves + 1):
            mouse.move(x + (track["x"] + share * track["width"] - x) * i / moves, y)
        mouse.up()

    def number(self, label: str) -> int:
        """What stands beside a slider."""
        return int(self.field(label).locator(".widget-readout").inner_text())

    def tags(self, label: str) -> Locator:
        """The tags of a field, each with its cross."""
        return self.field(label).locator(".jupyter-widget-tag-close")

    def says(self, text: str, seconds: float = 60) -> str:
        """Wait until the panel says this somewhere; gives the whole sentence."""
        found = self.root.get_by_text(text).first
        expect(found).to_be_visible(timeout=seconds * 1000)
        return found.inner_text()

    def shows(self, title: str, seconds: float = 60) -> None:
        """Wait for a figure whose title begins so."""
        expect(self.root.locator(".gtitle", has_text=title).first).to_be_visible(timeout=seconds * 1000)

    def figures(self) -> list[Any]:
        """Titles and data of what is drawn."""
        found: list[Any] = self.root.locator(".omnigraph-plots .js-plotly-plot").evaluate_all(FIGURES)
        return found
