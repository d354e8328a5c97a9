"""The benchmark suite's own code: a miss is told as a miss, what is counted is what runs, and what is saved can be read."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import omnigraph as og
from omnigraph import _bars, recorded
from omnigraph._files import write_json
from omnigraph._provenance import provenance

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "data" / "bench"
sys.path.insert(0, str(BENCH))

import count_work  # noqa: E402
import plans  # noqa: E402
import profile_kernels  # noqa: E402
import study_compile  # noqa: E402


def row(name: str, value: float) -> dict[str, Any]:
    return {"row": name, "value": value, "low": value, "high": value, "how": "given"}


def verdicts(rows: list[dict[str, Any]], cuda: bool = True) -> dict[str, str]:
    return {bar.row: shown["verdict"] for bar, shown in zip(_bars.BARS, _bars.table(rows, cuda), strict=True)}


@pytest.mark.parametrize("bar", _bars.BARS, ids=lambda bar: bar.row)
def test_a_miss_is_told_as_a_miss(bar: _bars.Bar) -> None:
    worse, better = (bar.target * factor for factor in ((1.01, 0.99) if bar.at_most else (0.99, 1.01)))
    for value, verdict in ((worse, "missed"), (bar.target, "met"), (better, "met"), (math.nan, "missed")):
        assert verdicts([row(bar.row, value)])[bar.row] == verdict, value
    text = _bars.text([row(bar.row, worse)], "a device")
    assert text.count("MISSED") == 1 and "1 missed" in text and "a device" in text


def test_what_was_not_measured_is_not_met() -> None:
    assert set(verdicts([]).values()) == {"not measured"}
    on_cpu = verdicts([], cuda=False)
    assert {name for name, verdict in on_cpu.items() if verdict == "not measured"} == {"host", "host_checked"}
    assert set(on_cpu.values()) == {"not measured", "needs a GPU"}


def test_rows_of_no_bar_and_rows_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="'speed' is no row"):
        _bars.table([row("speed", 1.0)])
    with pytest.raises(ValueError, match="'host' is there twice"):
        _bars.table([row("host", 1.0), row("host", 1.0)])


def test_the_worst_of_all_shapes_is_what_host_time_is_judged_by() -> None:
    def times(bare: float, decode: float, checked: float) -> dict[str, Any]:
        return {f"{name}_us": {"median": us} for name, us in (("bare", bare), ("decode", decode), ("decode_checked", checked))}

    host = [
        {"shape": (1, 4), **times(10, 11, 20), "in_a_row": times(10, 15, 18)},
        {"shape": (1, 50), **times(20, 22, 60), "in_a_row": times(10, 10, 11)},
    ]
    ratio, added = _bars.host_rows(host)
    assert (ratio["value"], ratio["low"], ratio["how"].partition(":")[0]) == (1.5, 1.0, "1x4 in a row")
    assert (added["value"], added["low"], added["how"].partition(":")[0]) == (38, 1, "1x50")


def test_recorded_rows_are_those_of_their_files() -> None:
    capture, chunks = recorded.capture_bench(BENCH / "h200_capture.json", "bfloat16"), recorded.chunks_bench(BENCH / "h200_chunks.json")
    rows = {found["row"]: found for found in recorded.rows_of(capture, chunks)}
    assert rows["plain"]["value"] == pytest.approx(12.93 / 2.89, rel=0.01)
    assert rows["compiled"]["value"] == pytest.approx(14.74 / 4.38, rel=0.01)
    assert rows["ragged"]["value"] == chunks.content["ragged"]["ratio"]["loop"]
    assert rows["capture_memory"]["value"] == capture.content["startup"]["memory_ratio"]
    assert all(found["low"] <= found["value"] <= found["high"] for found in rows.values())


def test_how_another_way_stands() -> None:
    def times(ms: float) -> dict[str, float]:
        return {"median": ms, "q1": 0.99 * ms, "q3": 1.01 * ms}

    calls = [
        {"shape": [1, 50], "way": way, "start_s": 1.0, "bitwise": True, "ms": times(ms)}
        for way, ms in (("eager", 14.0), ("omnigraph", 6.7), ("torch.cuda.graph", 6.6), ("omnigraph, compiled", 4.4))
    ] + [{"shape": [1, 50], "way": "torch.compile, reduce-overhead", "start_s": 1.0, "bitwise": False, "ms": times(4.0)}]
    found = recorded.SpeedBench({"raw": {"beside": {"calls": calls}}}).beside.set_index("way")["omnigraph"]
    assert found.to_dict() == {
        "eager": "ahead",
        "omnigraph": "level",
        "torch.cuda.graph": "level",
        "omnigraph, compiled": "level",
        "torch.compile, reduce-overhead": "behind",
    }


@pytest.fixture(scope="module")
def small() -> nn.Module:
    return og.models.code2wav("small")


@pytest.mark.parametrize("frames", [3, 17], ids=["within the window", "beyond it"])
def test_what_is_counted_on_meta_is_what_runs(small: nn.Module, frames: int) -> None:
    meta = count_work.on_meta("small", torch.float32)
    counted, ran = (count_work.work_of(module, (1, frames), 8) for module in (meta, small))
    assert {kind: of["flops"] for kind, of in counted.kinds.items()} == {kind: of["flops"] for kind, of in ran.kinds.items()}
    for kind in ("convolution", "product", "attention"):
        assert counted.kinds[kind] == ran.kinds[kind]
    # The same operations but for the mask: there the real run reads values, and the one on meta is told what they are.
    assert abs(counted.kinds["other"]["bytes"] / ran.kinds["other"]["bytes"] - 1) < 1e-3
    assert counted.audio.shape == ran.audio.shape
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        small(torch.zeros(1, 8, frames, dtype=torch.int64))
    products = counted.kinds["convolution"]["flops"] + counted.kinds["product"]["flops"]
    assert products == sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if "dot_product" not in str(op))


def test_bytes_by_hand() -> None:
    """A product of [4, 8] and [8, 2] and a broadcast sum, in float32; a view is free."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 2))

        def forward(self, codes: torch.Tensor) -> torch.Tensor:
            return (codes[0].float() @ self.weight).view(2, 4) + torch.ones(1, 1).expand(2, 4)

    work = count_work.work_of(Two(), (1, 8), num_quantizers=4)
    assert dict(work.kinds["product"]) == {"ops": 1, "flops": 2 * 4 * 8 * 2, "bytes": 4 * (32 + 16 + 8)}
    codes, casts, ones, sums = 0, 32 * (8 + 4), 4, 4 * (8 + 1 + 8)
    assert work.kinds["other"]["bytes"] == codes + casts + ones + sums


def test_integer_padding_is_the_padding_of_transformers(small: nn.Module) -> None:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCausalConvNet as Conv

    for kernel, dilation, stride in ((7, 1, 1), (7, 9, 1), (1, 1, 1), (4, 1, 2), (5, 2, 3)):
        conv = Conv(1, 1, kernel, dilation=dilation, stride=stride)
        for length in range(1, 40):
            hidden = torch.empty(1, 1, length)
            assert study_compile.extra_padding(conv, hidden) == conv._get_extra_padding_for_conv1d(hidden), (kernel, stride, length)


def test_kernels_of_a_replay_are_counted_saved_and_read(tmp_path: Path) -> None:
    names = ("void at::native::(anonymous namespace)::k<4, f<int> >(int, f<x>)", "sm90_xmma_gemm_bf16", "triton_poi_fused_sin_0")
    assert [profile_kernels.kind_of(name) for name in names] == ["other", "product", "fused by Inductor"]
    assert profile_kernels.short(names[0]) == "at::native::(anonymous namespace)::k<4, f<int> >"
    with og.GraphedDecoder(og.models.tiny(), og.BucketPlan(((1, 4), (1, 9)))) as decoder:
        decoder.warmup(strict=True)
        results = [profile_kernels.profiled(decoder, bucket, replays=3) for bucket in decoder.captured]
        content = {"provenance": provenance(decoder.module, method="a test"), "results": results}
    found = recorded.kernels(write_json(tmp_path / "kernels.json", profile_kernels.SCHEMA, content)).frame
    assert list(dict.fromkeys(found["bucket"])) == ["1x9", "1x4"]
    convolutions = found[found["kind"] == "convolution"].groupby("bucket")["count"].sum()
    assert (convolutions >= 1).all() and (found["us"] > 0).all()


def test_the_suite_runs_and_what_it_saves_can_be_read(tmp_path: Path) -> None:
    plugin = ["-p", "pytest_benchmark.plugin", "--benchmark-storage", f"file://{tmp_path / 'storage'}"]
    chosen = ["tests/bench/bench_host.py", "-k", "bars or push", "--bench-out", str(tmp_path)]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # as a worker it measures nothing
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, *chosen],
        cwd=ROOT,
        env=alone | {"OMP_NUM_THREADS": "1", "BENCH_ROUNDS": "10"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "the project's bars" in done.stdout
    [path] = tmp_path.glob("*_speed.json")
    bench = recorded.speed_bench(path)
    assert {found["row"] for found in bench.content["rows"]} == {"host", "host_checked"}
    host = bench.host.set_index("name")
    assert host.loc["bare", "beyond"] == 0 and host.loc["push", "us"] > host.loc["bare", "us"]
    assert json.loads(path.read_text())["provenance"]["method"]


def test_the_planners_promise_is_measured_beside_it() -> None:
    module = og.models.tiny(hidden=4, receptive_field=2, upsample=4)
    shapes = [og.Shape(1, frames) for frames in (2, 4, 8, 16, 25, 32, 50, 325)]
    profile = og.Profile.measure(module, shapes, repeats=5, seconds_each=0.05, progress=False)
    slower = tuple(replace(point, ms=10 * point.ms) if point.how == "eager" else point for point in profile.points)
    profile = replace(profile, points=slower)  # so that graphs pay, on whatever machine
    trace = og.Trace.synthesise(requests=20, seed=1)
    found = plans.replayed(module, trace, profile, calls=40)
    frame = recorded.SpeedBench({"raw": {"plans": [found]}}).plans
    assert frame["way"].tolist() == ["plan", "heuristic", "eager"] and set(frame["calls"]) == {40}
    assert frame["graphs"].tolist() == [len(found["plan"]["buckets"]), 11, 0] and 0 < frame["graphs"][0] <= 5
    assert (frame["measured_ms"] > 0).all() and (frame["hit_rate"] == [1, 1, 0]).all()
    assert frame["ratio"].tolist() == pytest.approx((frame["measured_ms"] / frame["expected_ms"]).tolist())
    rows = {row["row"]: row["value"] for row in plans.rows(found)}
    assert rows["plans_time"] == pytest.approx(frame["measured_ms"][0] / frame["measured_ms"][1])
    assert rows["plans_memory"] == pytest.approx(frame["mib"][0] / frame["mib"][1])
