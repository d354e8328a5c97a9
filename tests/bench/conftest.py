"""What the benchmarks share: the device and model they measure, what they have found, and the table that is printed of it at the end.

They are no tests: `make bench` runs the `bench_*.py` files, with pytest-benchmark, and `make test` does not. BENCH_ROUNDS in the
environment is the most rounds of a host cost: a few show that the suite works.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import omnigraph as og
from omnigraph import _bars
from omnigraph._files import write_json
from omnigraph._provenance import device_name, provenance
from omnigraph._speed import SPEED

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "data" / "bench"))

from bench_timing import slug, spread, sync  # noqa: E402

METHOD = (
    "one process, what is compared taken in turn; medians and quartiles after warm-up, random codes; CUDA events for device times, "
    "perf_counter for host times, pytest-benchmark for single host costs"
)


@dataclass
class Found:
    """What the benchmarks of this session have measured so far."""

    device: torch.device
    out: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    host: list[dict[str, Any]] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.out / f"{slug(self.device)}_speed.json"

    def save(self) -> None:
        content = {"provenance": self.about, "rows": self.rows, "host": self.host, "raw": self.raw, "seconds": self.seconds}
        write_json(self.path, SPEED, content)


ROUNDS = int(os.environ.get("BENCH_ROUNDS", "300"))
FOUND = pytest.StashKey[Found]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bench-out", type=Path, default=ROOT / "data" / "bench", help="the folder for <device>_speed.json")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def module(device: torch.device) -> nn.Module:
    """Code2Wav in bfloat16 on a GPU. On a CPU a decoder of a few operations: there host time is what is measured, and includes the work."""
    if device.type == "cuda":
        return og.models.code2wav("default", dtype=torch.bfloat16, device=device)
    return og.models.tiny(hidden=4, receptive_field=2, upsample=4)


@pytest.fixture(scope="session")
def session_found(request: pytest.FixtureRequest, device: torch.device, module: nn.Module) -> Found:
    found = Found(device, request.config.getoption("--bench-out"), about=provenance(module, method=METHOD))
    request.config.stash[FOUND] = found
    return found


@pytest.fixture
def found(request: pytest.FixtureRequest, session_found: Found) -> Iterator[Found]:
    """Where a benchmark puts what it measures; saved after each, with the seconds that it took."""
    start = time.perf_counter()
    yield session_found
    session_found.seconds[request.node.name] = round(time.perf_counter() - start, 1)
    session_found.save()


@pytest.fixture
def cost(benchmark: Any, found: Found, device: torch.device) -> Callable[..., None]:
    """Measure the host time of a call, the device idle before, as one of a group; `per` says how many units of work it holds."""

    def measure(group: str, name: str, call: Callable[[], object], *, per: int = 1, rounds: int = 300) -> None:
        rounds = min(rounds, ROUNDS)
        benchmark.group = group
        benchmark.pedantic(call, setup=lambda: sync(device), rounds=rounds, warmup_rounds=min(rounds, 20))
        times = benchmark.stats.stats.data
        found.host.append(
            {"group": group, "name": name, "per": per, "us": spread([1e6 * seconds for seconds in times]), "rounds": len(times)}
        )

    return measure


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = config.stash.get(FOUND, None)
    if found is not None:
        terminalreporter.section("the project's bars")
        terminalreporter.write_line(_bars.text(found.rows, device_name(found.device), found.device.type == "cuda"))
        terminalreporter.write_line(f"saved: {found.path}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """On a GPU a missed bar is a failure."""
    found = session.config.stash.get(FOUND, None)
    cuda = found is not None and found.device.type == "cuda" and session.exitstatus == 0
    if cuda and any(row["verdict"] == "missed" for row in _bars.table(found.rows)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
