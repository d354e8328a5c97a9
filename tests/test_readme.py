"""The README's snippet runs as it stands, and what it links to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [snippet] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(snippet, {})  # noqa: S102
    said = capsys.readouterr().out
    assert "4 of 4 buckets captured" in said
    assert "all as eager" in said
    assert "(2, 1, 575445)" in said


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) >= 5
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_notebook_is_listed_in_order() -> None:
    notebooks = sorted(f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert re.findall(r"\]\((notebooks/[^)]+)\)", README) == notebooks
