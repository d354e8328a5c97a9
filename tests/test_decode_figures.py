from __future__ import annotations

from pathlib import Path

import pytest

from omnigraph import _decode_figures as figures
from omnigraph._files import FileError, write_json
from omnigraph._provenance import provenance
from omnigraph.models import qwen_bench
from omnigraph.models._qwen_image import qwen_image

MODEL = qwen_image("small")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> figures.PrefixBench:
    content = {
        "provenance": provenance(MODEL, method="a test"),
        "bitwise": [True] * 7 + [False],
        "steps": list(qwen_bench.step_times(MODEL, [16, 64], text=8, repeats=3)),
        "contention": list(qwen_bench.contention_times(MODEL, [16], [8, 16], repeats=3)),
        "host": {"beyond_us": 41.6, "layers": 3},
        "memory": [{"prefix": 8, "target": 16, "bytes": 990, "device_bytes": 1000}],
    }
    return figures.prefix_bench(write_json(tmp_path_factory.mktemp("data") / "prefix.json", figures.SCHEMA, content))


def test_measurements_become_tables_with_quartiles(bench: figures.PrefixBench) -> None:
    assert list(bench.steps["target"]) == [16, 64]
    assert bench.steps["bitwise"].all()
    for way in ("eager_ms", "step_ms", "graph_ms"):
        assert (bench.steps[f"{way}_q1"] <= bench.steps[way]).all()
        assert (bench.steps[way] <= bench.steps[f"{way}_q3"]).all()
    assert (bench.steps["ratio"] == bench.steps["eager_ms"] / bench.steps["graph_ms"]).all()
    assert list(bench.contention["prefix"]) == [8, 16]
    assert bench.contention["copy_bytes"].is_monotonic_increasing
    assert "7 of 8 steps" in bench.summary
    assert "42 microseconds" in bench.summary
    assert "within 1.0%" in bench.summary


def test_each_figure_says_where_its_numbers_are_from(bench: figures.PrefixBench) -> None:
    steps = figures.step_times(bench.steps, bench.source)
    assert [trace.name for trace in steps.data] == ["eager", "target tokens alone, no graph", "graph"]
    contended = figures.contention_times(bench.contention, 16, bench.source)
    assert len(contended.data) == 3
    for figure in (steps, contended):
        assert "QwenImage21Transformer2DModel" in figure.to_json()


def test_a_cache_shows_its_memory_and_what_it_served() -> None:
    from omnigraph.models import QwenImageAdapter
    from omnigraph.prefix import DecodeGraphCache

    cache = DecodeGraphCache(QwenImageAdapter(MODEL))
    qwen_bench.Case(MODEL, cache, 16, 8).graph()
    qwen_bench.Case(MODEL, cache, 16, 9, register=False).either()
    memory = figures.memory_by_entry(cache.to_frame(), "here")
    assert sum(sum(bar.x) for bar in memory.data) * 2**20 == pytest.approx(cache.nbytes)
    served = figures.outcomes_by_key(cache.stats.to_frame(), "here")
    assert {bar.name: list(bar.x) for bar in served.data} == {"replayed": [1], "unknown_key": [1]}
    with pytest.raises(RuntimeError, match="not served by a graph"):
        qwen_bench.Case(MODEL, cache, 16, 10, register=False).graph()


def test_another_schema_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="schema"):
        figures.prefix_bench(write_json(tmp_path / "other.json", "omnigraph.plan/1", {}))
