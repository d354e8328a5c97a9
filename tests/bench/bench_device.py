"""The rows of the project's table that need a GPU, each measured by what `data/bench` measures and records in full."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from torch import nn

import omnigraph as og
from omnigraph import _bars

from .bench_host import PROFILE, TRACE
from .conftest import Found

pytestmark = pytest.mark.gpu
TRACES = [TRACE, *filter(None, os.environ.get("BENCH_TRACES", "").split(os.pathsep))]  # the project's rows are the first's


def test_plain(found: Found, module: nn.Module) -> None:
    """Row "plain"."""
    from measure_capture import latencies

    with og.GraphedDecoder(module, og.BucketPlan(((1, 4),))) as decoder:
        decoder.warmup(strict=True)
        found.raw["plain"] = latencies(module, decoder, 40, [(1, 4)])
    found.rows.append(_bars.latency_row("plain", found.raw["plain"], (1, 4)))


def test_compiled(found: Found, module: nn.Module) -> None:
    """Row "compiled"."""
    from measure_capture import compiled

    found.raw["compiled"] = rows = compiled(module)
    assert rows[1]["bucket"] == "1x50 compiled" and rows[1]["ok"], rows[1]
    found.rows.append(_bars.compared("compiled", ("eager", "decode"), rows[1]["eager_ms"], rows[1]["decode_ms"]))


def test_capture(found: Found, module: nn.Module) -> None:
    """Rows "capture_time" and "capture_memory": three rounds of 33 shapes each way."""
    from measure_capture import startup

    found.raw["capture"], decoder, _ = startup(module)
    decoder.close()
    found.rows += _bars.capture_rows(found.raw["capture"])


def test_ragged(found: Found, module: nn.Module) -> None:
    """Row "ragged"."""
    from measure_chunks import BUCKETS, ragged_times

    with og.GraphedDecoder(module, BUCKETS) as decoder:
        decoder.warmup(strict=True)
        found.raw["ragged"] = ragged_times(decoder, 8)[0]
    found.rows.append(_bars.ragged_row(found.raw["ragged"]))


def test_first_audio(found: Found, module: nn.Module) -> None:
    """Row "first_audio"."""
    from measure_chunks import first_audio

    found.raw["first_audio"] = first_audio(module, 8)
    found.rows.append(_bars.first_audio_row(found.raw["first_audio"]))


def test_plans(found: Found, module: nn.Module) -> None:
    """Rows "plans_time" and "plans_memory": 2,000 calls of each trace under two plans and eagerly."""
    import plans

    profile = og.Profile.load(PROFILE)
    assert not profile.check(module)
    found.raw["plans"] = [plans.replayed(module, og.Trace.load(path), profile) for path in TRACES]
    found.rows += plans.rows(found.raw["plans"][0])


def test_beside(found: Found, module: nn.Module) -> None:
    """What a user would otherwise pick, in this process and on this module."""
    import beside

    found.raw["beside"] = {"calls": [], "long": beside.long_decode(module, 5)}
    for shape in beside.SHAPES:
        found.raw["beside"]["calls"] += beside.calls(module, shape, 30)


def test_step(found: Found, device: torch.device) -> None:
    """Row "step": 7.1 B parameters."""
    from omnigraph.models.qwen_bench import step_times

    gc.collect()
    torch.cuda.empty_cache()
    [row] = step_times(og.models.qwen_image("default", device=device), [256], compiled=[256], repeats=20)
    found.raw["step"] = row
    found.rows.append(_bars.compared("step", ("eager", "compiled in the graph"), row["eager_ms"], row["compiled_ms"]))
