"""The dashboard as an application: `make voila`, as a user starts it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from browser.lab_driver import ROOT, free_port, serving, tab
from browser.panel_driver import OnPage

pytestmark = pytest.mark.browser


def test_the_dashboard_is_an_application(program: str, tmp_path: Path) -> None:
    port = free_port()
    address = f"http://127.0.0.1:{port}/"
    command = ["make", "voila", f"VOILA_ARGS=--no-browser --port={port}"]
    with serving(command, f"{address}voila/static/", tmp_path), tab(address, program) as opened:
        opened.page.goto(address)
        panels = opened.page.locator(".omnigraph-panel")
        expect(panels).to_have_count(2, timeout=120_000)
        live, h200 = OnPage(panels.nth(0)), OnPage(panels.nth(1))
        live.shows("Predicted and measured")
        h200.press("Hits and latency")
        h200.shows("How calls are served")
        h200.choose("Preset", "powers of two")
        expect(h200.root.get_by_text(re.compile(r"^graphs\s*7$"))).to_be_visible()
        expect(opened.page.get_by_text("import omnigraph")).to_have_count(0)
        opened.page.screenshot(path=ROOT / "build" / "browser" / "voila.png")
        assert opened.outside == []
        # Voila's page asks for icons and MathJax from elsewhere: the policy that `make voila` sets refuses, and says so.
        assert [error for error in opened.console if "violates the following Content Security Policy" not in error] == []
