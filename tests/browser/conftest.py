"""The browser tests' fixtures: a chromium, and a JupyterLab that serves a copy of the notebooks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from browser.lab_driver import INSTALL, ROOT, Tab, chromium, lab, tab


@pytest.fixture(scope="session")
def program() -> str:
    found = chromium()
    if found is None:
        if "CI" in os.environ:
            pytest.fail(f"CI runs the browser tests, but {INSTALL}")
        pytest.skip(INSTALL)
    return found


@pytest.fixture(scope="session")
def address(program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("project")
    for name in ("notebooks", "data"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(".*"))
    with lab(folder, tmp_path_factory.mktemp("lab")) as found:
        yield found


@pytest.fixture
def notebook(address: str, program: str, request: pytest.FixtureRequest) -> Iterator[Tab]:
    with tab(address, program) as opened:
        yield opened
        shots = ROOT / "build" / "browser"
        shots.mkdir(parents=True, exist_ok=True)
        opened.page.screenshot(path=shots / f"{request.node.name}.png")
