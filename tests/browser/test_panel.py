"""The dashboard of notebook 6, as a user has it: drag, be refused, apply, cancel, export, upload, reload."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from browser.lab_driver import NOTEBOOK, ROOT, Tab
from browser.panel_driver import OnPage
from omnigraph import BucketPlan

pytestmark = pytest.mark.browser
SHOTS = ROOT / "build" / "browser"


def shoot(tab: Tab, panel: OnPage, name: str) -> None:
    """Keep what the panel looks like on a wide page and on a narrow one."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    for width in (900, 1400):
        tab.page.set_viewport_size({"width": width, "height": 1900})
        panel.root.evaluate("panel => panel.scrollIntoView()")
        tab.page.wait_for_timeout(250)
        tab.page.screenshot(path=SHOTS / f"panel_{name}_{width}.png")


@pytest.fixture
def panels(notebook: Tab) -> Iterator[tuple[OnPage, OnPage]]:
    """The panel with the decoder, and the one on recorded times."""
    notebook.open("notebooks/06_hit_rates_and_latency.ipynb")
    notebook.run_all()
    assert notebook.raised() == []
    found = notebook.page.locator(".omnigraph-panel")
    yield OnPage(found.nth(0)), OnPage(found.nth(1))
    assert notebook.outside == []
    assert notebook.console == []


def test_a_panel_from_first_drag_to_reload(notebook: Tab, panels: tuple[OnPage, OnPage], tmp_path: Path) -> None:
    live, h200 = panels
    page = notebook.page
    live.shows("Predicted and measured")
    shoot(notebook, live, "measured")

    h200.press("Hits and latency")
    h200.shows("How calls are served")
    h200.drag("Graphs", 0.4, moves=50)
    graphs = h200.number("Graphs")
    assert 10 < graphs < 43
    expect(h200.root.get_by_text(re.compile(rf"^graphs\s*{graphs}$"))).to_be_visible()
    expect(h200.tags("Bucket sizes")).to_have_count(graphs)
    shoot(notebook, h200, "dragged")

    h200.enter("Bucket sizes", "0x50")
    assert "from 1 to" in h200.says("Refused")
    h200.enter("Chunk", "-3")
    expect(h200.field("Chunk").get_by_text("Refused: a chunk is a whole number from 1 to 10,000, not '-3'")).to_be_visible()
    shoot(notebook, h200, "refused")
    h200.enter("Chunk", "25")
    expect(h200.field("Chunk").get_by_text("Refused")).to_have_count(0)

    for view, title in (("Memory and budget", "What each further graph"), ("Under load", "Service under load")):
        h200.press(view)
        h200.shows(title)
        shoot(notebook, h200, view.split()[0].lower())

    live.choose("Preset", "powers of two")
    live.press("Hits and latency")
    live.press("Apply")
    expect(live.root.get_by_text(re.compile(r"^capture 1x"))).to_be_visible()
    live.root.screenshot(path=SHOTS / "panel_progress.png")
    live.press("Cancel")
    live.says("Cancelled: the decoder keeps what it had.")
    shoot(notebook, live, "cancelled")
    live.press("Apply")
    assert "7 of 7 buckets captured" in live.says("Applied:") or "kept" in live.says("Applied:")
    live.shows("Predicted and measured")
    shoot(notebook, live, "applied")

    live.press("Play")
    live.shows("Calls over time")
    live.says("Playing assistant")
    shoot(notebook, live, "live")
    live.press("Stop")
    live.says("Played assistant")
    live.press("Measured")
    live.shows("Predicted and measured")

    live.root.locator(".widget-text", has_text="File").locator("input").fill(str(tmp_path / "plan.json"))
    live.press("Export")
    live.says("Written:")
    assert [str(bucket) for bucket in BucketPlan.load(tmp_path / "plan.json").buckets] == [f"1x{2**n}" for n in range(6, -1, -1)]

    (tmp_path / "mine.csv").write_text("arrival,frames\n" + "".join(f"{i / 10},{20 + i}\n" for i in range(100)))
    h200.press("Hits and latency")
    with page.expect_file_chooser() as chooser:
        h200.root.get_by_role("button", name="Upload a CSV").click()
    chooser.value.set_files(tmp_path / "mine.csv")
    expect(h200.field("Trace").locator("select")).to_have_value("mine (uploaded)")
    expect(h200.root.get_by_text("calls of mine").first).to_be_visible()
    shoot(notebook, h200, "uploaded")

    before = live.figures(), h200.figures()
    assert all(before)
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function(f"() => !{NOTEBOOK}.context.model.dirty")
    page.reload()
    live.shows("Predicted and measured")
    h200.shows("How calls are served")
    expect(h200.root.get_by_text("calls of mine").first).to_be_visible()
    assert (live.figures(), h200.figures()) == before
    shoot(notebook, h200, "reloaded")


def test_a_panel_lives_while_a_cell_runs_and_no_longer_than_its_cell(notebook: Tab) -> None:
    notebook.open("notebooks/06_hit_rates_and_latency.ipynb")
    notebook.clear()
    for cell in range(3):
        notebook.run_cell(cell)
    live = OnPage(notebook.page.locator(".omnigraph-panel"))
    live.shows("Calls by length")

    # What a user enters is handled where the field was last sent from: the main thread, or a subshell, which answers while a cell runs.
    threads = "[panel.controls.fields['chunk'].control.observe(lambda _: threads.append(threading.current_thread().name), 'value')]"
    notebook.value("globals().update(threads=[], threading=__import__('threading'))")
    notebook.value(threads)
    live.enter("Chunk", "40")
    expect(live.root.get_by_text("chunks of 40 with 25").first).to_be_visible()
    notebook.in_subshell("[field.control.send_state() for field in panel.controls.fields.values()]")
    notebook.start("busy = True; time.sleep(20); busy = False")
    live.enter("Chunk", "30")
    expect(live.root.get_by_text("chunks of 30 with 25").first).to_be_visible(timeout=15_000)
    assert notebook.in_subshell("busy") == "True"
    main, subshell = notebook.value("threads").strip("[]").split(", ")
    assert "MainThread" in main
    assert "subshell" in subshell

    notebook.value("globals().update(before=panel)")
    notebook.run_cell(2)
    live.shows("Calls by length")
    assert notebook.value("before.closed, panel.closed") == "(True, False)"
    assert notebook.value("(before.decoder, before.frame.root.comm, *map(str, decoder.captured))") == "(None, None, '1x25')"
    assert notebook.outside == []
    assert notebook.console == []
