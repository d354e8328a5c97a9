"""The house rules that a reader of one file cannot see: order of floors, names, what `import omnigraph` loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "omnigraph"
# A file imports only from those before its own. `models` is a folder: its files count as one, and see each other. A private file
# that is not listed has no floor of its own: what it imports counts as imported by those that import it.
# fmt: off
FLOORS = [
    "_files", "_needs", "_provenance", "shapes", "trace", "stats", "chunks", "packing", "_record", "graph", "facts",
    "streaming", "decoder", "prefix", "compare", "driving", "profile", "recorded", "serving", "planner", "sweeping",
    "models", "figures", "widgets", "__main__",
]
# fmt: on
HEAVY = {"dask", "diffusers", "distributed", "IPython", "ipywidgets", "pandas", "peft", "plotly", "safetensors", "scipy", "tqdm"}
HEAVY |= {"pystoi", "soundfile", "transformers"}
TEXT = {".py", ".ipynb", ".md", ".json", ".csv", ".toml", ".yml", ".txt", ".cfg", ".js", ".css", "", ".typed"}
ELSEWHERE = re.compile(r"(?<![\w.~])/(?:work|farm|root|home|Users|tmp)/[\w.-]+")


def floor(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def imported(path: Path) -> set[str]:
    """The floors that a file imports from, wherever in it the import stands; `omnigraph.__version__` is on no floor."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) + 1 - node.level]] if node.level else []
            base += node.module.split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [[node.value.id, node.attr]]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "omnigraph" and len(name) > 1}
    return found - {"__version__"}


def reached(path: Path) -> set[str]:
    """The floors that a file imports from, itself or through private files."""
    found: set[str] = set()
    fresh = imported(path)
    while fresh:
        found |= fresh
        private = [PACKAGE / f"{name}.py" for name in fresh if name.startswith("_") and name not in FLOORS]
        fresh = set().union(*map(imported, private)) - found
    return found


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_from_floors_below_its_own(path: Path) -> None:
    own = floor(path)
    below = reached(path)
    if own.startswith("_") and own not in FLOORS:
        assert own not in below, f"{own} imports itself, by way of others"
        return
    assert own in FLOORS, f"{path.name} has no floor: give it one in FLOORS"
    allowed = FLOORS[: FLOORS.index(own)] + ["models"] * (own == "models")
    assert {name for name in below if name in FLOORS or not name.startswith("_")} <= set(allowed), f"{own} is built on a floor above it"


def test_the_reader_of_imports_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "omnigraph" / "models" / "one.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import torch, omnigraph.shapes\nfrom omnigraph.stats import x\nfrom omnigraph import trace\nfrom .. import graph\n"
        "from ..facts import y\nfrom . import two\ndef f():\n    from omnigraph.models.two import z\n"
        "import omnigraph\nomnigraph.decoder, omnigraph.__version__\n"
    )
    assert imported(path) == {"shapes", "stats", "trace", "graph", "facts", "models", "decoder"}


@pytest.mark.parametrize("call", ["torch.cuda.CUDAGraph", "torch.cuda.synchronize(", "torch.cuda.empty_cache("])
def test_what_breaks_another_threads_capture_is_called_in_one_place(call: str) -> None:
    """A wait for the whole device or an emptied cache ends a capture of any thread: graph.py does both between captures."""
    assert [path.name for path in files() if call in path.read_text()] == ["graph.py"]


def test_no_module_bears_the_name_of_a_public_function() -> None:
    import omnigraph

    taken = {floor(path) for path in files()} & set(omnigraph.__all__)
    assert all(isinstance(getattr(omnigraph, name), types.ModuleType) for name in taken), taken


def test_all_public_names_exist() -> None:
    import omnigraph

    assert [name for name in omnigraph.__all__ if not hasattr(omnigraph, name)] == []


def test_import_needs_torch_alone() -> None:
    program = f"import sys, torch; before = set(sys.modules); import omnigraph; print(*sorted((set(sys.modules) - before) & {HEAVY}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == []


def test_the_package_ships_its_types() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    kept = [path for path in ROOT.iterdir() if path.is_file()]
    kept += [path for folder in ("omnigraph", "notebooks", "data", "tests", ".ci") for path in (ROOT / folder).rglob("*")]
    found = []
    for path in kept:
        if path.is_file() and path.suffix in TEXT and not {"__pycache__", ".ipynb_checkpoints"} & set(path.parts):
            text = path.read_text(encoding="utf-8")
            found += [f"{path.relative_to(ROOT)}: {m.group()}" for m in ELSEWHERE.finditer(text)]
            found += [f"{path.relative_to(ROOT)}: {ROOT}"] * (f"{ROOT}/" in text)
    assert found == []
