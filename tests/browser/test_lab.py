"""A newcomer's first minutes: the quickstart in JupyterLab, all cells run, figures drawn, nothing asked of the network."""

from __future__ import annotations

import pytest

from browser.lab_driver import Tab

pytestmark = pytest.mark.browser


def test_quickstart_runs_from_top_to_bottom(notebook: Tab) -> None:
    notebook.open("notebooks/00_quickstart.ipynb")
    notebook.run_all()
    assert notebook.raised() == []
    titles = notebook.figure_titles()
    assert titles
    assert all(titles), f"a figure without a title: {titles}"
    notebook.page.locator(".js-plotly-plot").first.scroll_into_view_if_needed()
    assert notebook.outside == []
    assert notebook.console == []
