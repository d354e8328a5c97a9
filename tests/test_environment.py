"""pyproject.toml, constraints.txt, environment.yml and omnigraph/_needs.py say the same, and this interpreter satisfies them."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from omnigraph._needs import _INSTALL

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def requirements(lines: list[str]) -> dict[str, SpecifierSet]:
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): r.specifier for r in parsed if r.marker is None or r.marker.evaluate()}


def constraints() -> dict[str, SpecifierSet]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return requirements([line for line in lines if line and not line.startswith("#")])


DECLARED = requirements([*PROJECT["dependencies"], *EXTRAS["lab"], *EXTRAS["test"]])


def test_import_needs_torch_alone() -> None:
    assert list(requirements(PROJECT["dependencies"])) == ["torch"]


def test_environment_installs_what_make_lab_installs() -> None:
    [pip] = [entry["pip"] for entry in ENVIRONMENT["dependencies"] if isinstance(entry, dict)]
    assert pip == ["-c constraints.txt", "-e .[lab]"]


def test_environment_has_the_python_range_of_pyproject() -> None:
    conda = requirements([entry for entry in ENVIRONMENT["dependencies"] if isinstance(entry, str)])
    assert conda["python"] == SpecifierSet(PROJECT["requires-python"])


def test_the_lab_has_all_that_omnigraph_asks_for_with_the_same_ranges() -> None:
    asked = requirements(list(_INSTALL.values()))
    lab = requirements(EXTRAS["lab"])
    assert {name: lab.get(name) for name in asked} == asked


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_what_is_declared_is_pinned_and_installed(name: str) -> None:
    pins = list(constraints()[name])
    assert [pin.operator for pin in pins] == ["=="], f"constraints.txt pins one release of {name}"
    assert pins[0].version in DECLARED[name]
    assert version(name) in DECLARED[name]
