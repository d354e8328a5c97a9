"""The notebooks as files: readable on a code host without running them, and worth running under nbval."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LINES = 12  # of code in a cell: what a reader takes in at a glance
BYTES = 1_500_000

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def cells(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def code(cell: Any) -> str:
    return "\n".join(line for line in cell.source.splitlines() if not line.startswith(("%", "!")))


def test_there_is_a_quickstart() -> None:
    assert "00_quickstart.ipynb" in [path.name for path in NOTEBOOKS]


def test_each_number_is_given_once() -> None:
    assert len({path.name[:2] for path in NOTEBOOKS}) == len(NOTEBOOKS)


@each
def test_name_and_title(path: Path) -> None:
    assert re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", path.name)
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")


@each
def test_outputs_are_those_of_one_run_from_top_to_bottom(path: Path) -> None:
    counts = [cell.execution_count for cell in cells(path)]
    assert counts == list(range(1, len(counts) + 1)), "run `make refresh`"


@each
def test_nothing_was_written_to_stderr_but_progress(path: Path) -> None:
    written = [output.text for cell in cells(path) for output in cell.outputs if output.get("name") == "stderr"]
    assert [text for text in written if "%|" not in text] == []


@each
def test_the_tests_that_it_names_exist(path: Path) -> None:
    sources = " ".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    text = path.read_text(encoding="utf-8")
    assert [name for name in set(re.findall(r"`(test_\w+)`", text)) if f"def {name}(" not in sources] == []
    assert [file for file in set(re.findall(r"`((?:\w+/)?test_\w+\.py)`", text)) if not (ROOT / "tests" / file).exists()] == []


@each
def test_no_stored_cell_raised(path: Path) -> None:
    raised = [
        (cell.execution_count, output.ename)
        for cell in cells(path)
        for output in cell.outputs
        if output.output_type == "error" and "raises-exception" not in cell.metadata.get("tags", [])
    ]
    assert raised == []


@each
def test_file_is_valid_small_and_without_widget_state(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata, "run `make refresh`"
    assert path.stat().st_size < BYTES
    assert notebook.metadata.kernelspec.name == "python3"


@each
def test_cells_are_short(path: Path) -> None:
    lengths = {cell.execution_count: len([line for line in cell.source.splitlines() if line.strip()]) for cell in cells(path)}
    assert {count: n for count, n in lengths.items() if not 1 <= n <= LINES} == {}


@each
def test_it_compares_facts_and_asserts_them(path: Path) -> None:
    compared = [cell for cell in cells(path) if not {"nbval-ignore-output", "nbval-skip"} & set(cell.metadata.get("tags", []))]
    assert any(cell.outputs for cell in compared), "every output is ignored, so nbval tests nothing"
    assert any(isinstance(node, ast.Assert) for cell in cells(path) for node in ast.walk(ast.parse(code(cell))))
