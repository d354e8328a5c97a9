"""Host-side costs, on any machine: what a call costs beyond the copies and the replay that it must do, and what planning costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import omnigraph as og
from omnigraph import _bars
from omnigraph._fingerprint import Fingerprint
from omnigraph.chunks import schedule
from omnigraph.models.qwen_bench import Case
from omnigraph.packing import pack

from .conftest import ROOT, ROUNDS, Found

if TYPE_CHECKING:
    from omnigraph.graph import CapturedGraph

PROFILE = ROOT / "data" / "profiles" / "h200_code2wav_bf16.json"
TRACE = ROOT / "data" / "traces" / "assistant.csv"
CHUNKS = 12
Cost = Callable[..., None]


@pytest.fixture(scope="module")
def decoder(module: nn.Module) -> Iterator[og.GraphedDecoder]:
    with og.GraphedDecoder(module, og.BucketPlan.grid([1], [4, 25, 50]), check_codes=False) as decoder:
        decoder.warmup(strict=True)
        yield decoder


def codes_of(decoder: og.GraphedDecoder, frames: int) -> torch.Tensor:
    return decoder._codes(og.Shape(1, frames))


def graph_of(decoder: og.GraphedDecoder, frames: int) -> CapturedGraph:
    assert decoder._live is not None
    return decoder._live.graphs[og.Bucket(og.Shape(1, frames))]


def bare(decoder: og.GraphedDecoder, frames: int) -> Callable[[], torch.Tensor]:
    """The copy in, the launch and the copy out, and nothing else."""
    graph, codes = graph_of(decoder, frames), codes_of(decoder, frames)
    static, output = graph.inputs[0], graph.outputs

    def call() -> torch.Tensor:
        static.copy_(codes)
        graph.launch()
        return output.clone()

    return call


def test_bars_of_host_time(found: Found, decoder: og.GraphedDecoder) -> None:
    """Rows "host" and "host_checked"."""
    from measure_capture import host_times

    host = host_times(decoder, repeats=min(50 if found.device.type == "cuda" else 200, ROUNDS))
    found.raw["host"] = host
    found.rows += _bars.host_rows(host)


@pytest.mark.parametrize("name", ["bare", "decode", "decode, staleness checked"])
def test_decode(cost: Cost, decoder: og.GraphedDecoder, name: str) -> None:
    codes = codes_of(decoder, 4)
    decoder.check_stale = name != "decode"
    cost("decode 1x4", name, bare(decoder, 4) if name == "bare" else lambda: decoder.decode(codes))
    decoder.check_stale = True


@pytest.mark.parametrize("name", ["bare", "chunked_decode"])
def test_chunked_decode(cost: Cost, decoder: og.GraphedDecoder, name: str) -> None:
    """The loop over chunks of 25 with 25, against the replays it makes with their copies alone."""
    codes, facts = codes_of(decoder, 25 * CHUNKS), decoder.facts
    chunks = schedule(25 * CHUNKS, chunk_size=25, left_context_size=25, upsample=facts.upsample, trim=facts.trim)
    calls = {50: bare(decoder, 50), 25: bare(decoder, 25)}
    parts = [calls[chunk.last - chunk.first] for chunk in chunks]

    def replays() -> torch.Tensor:
        return torch.cat([call() for call in parts], -1)

    chunked = lambda: decoder.chunked_decode(codes, 25, 25)  # noqa: E731 - of the two, the one that is timed
    cost(f"{CHUNKS} chunks of 25 with 25", name, replays if name == "bare" else chunked, per=CHUNKS, rounds=100)


@pytest.mark.parametrize("name", ["bare", "push"])
def test_push(cost: Cost, decoder: og.GraphedDecoder, name: str) -> None:
    """A push of 25 frames that makes one chunk due, the stream being under way."""
    session, new = decoder.stream(chunk_size=25, left_context_size=25), codes_of(decoder, 25)
    for _ in range(2):
        session.push(new)
    cost("push of 25 frames", name, bare(decoder, 50) if name == "bare" else lambda: session.push(new))


@pytest.fixture(scope="module")
def case(device: torch.device) -> Case:
    """A request of the small Qwen-Image in the middle of its denoising: few layers, so little beside the costs of the host."""
    model = og.models.qwen_image("small", device=device)
    with torch.no_grad():
        case = Case(model, og.DecodeGraphCache(og.models.QwenImageAdapter(model)), 64, 64)
        case.graph()
    return case


@pytest.mark.parametrize("name", ["bare", "try_decode"])
@torch.no_grad()
def test_try_decode(cost: Cost, case: Case, name: str) -> None:
    buffers, graph = case.entry().buffers, case.entry().graph
    assert graph is not None

    def replay() -> Any:
        buffers.hidden.copy_(case.request.latents)
        buffers.timestep.copy_(case.time)
        graph.launch()
        return graph.outputs.clone()

    cost("a denoising step, small model", name, replay if name == "bare" else case.graph, rounds=100)


def test_staleness_check(cost: Cost, module: nn.Module, device: torch.device) -> None:
    """Of as many parameters, buffers and submodules as the full-size Code2Wav has; on a CPU narrow ones. The check walks all of them."""
    narrow = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "decoder_dim": 32}
    walked = module if device.type == "cuda" else og.models.code2wav(config={**narrow, "codebook_size": 64})
    fingerprint, tensors = Fingerprint(walked), len([*walked.parameters(), *walked.buffers()])
    assert fingerprint.changed() is None
    cost("staleness check", f"Code2Wav, {tensors} tensors", fingerprint.changed)


@pytest.mark.parametrize("name", ["route", "pack", "plan"])
def test_planning(cost: Cost, name: str) -> None:
    """A route of a new shape, the packing of 8 requests' windows, a plan for a whole trace. None of it is on the path of a known call."""
    profile, trace = og.Profile.load(PROFILE), og.Trace.load(TRACE)
    buckets = og.BucketPlan.grid([1, 2, 4, 8], [25, 32, 50]).buckets
    lengths = [37, 52, 81, 110, 143, 190, 222, 300]
    windows = [min(n - at, 25) + min(at, 25) for n in lengths for at in range(0, n, 25)]
    calls, shapes = trace.calls(25, 25), cycle([og.Shape(5, 41), og.Shape(3, 20), og.Shape(8, 50)])
    work: dict[str, Callable[[], object]] = {
        "route": lambda: og.route(next(shapes), buckets, profile.cost),
        "pack": lambda: pack(windows, buckets),
        "plan": lambda: og.plan_buckets(calls, profile, max_graphs=5),
    }
    units = {"route": "a shape of 12 buckets", "pack": f"{len(windows)} windows", "plan": f"{len(calls)} shapes, 5 graphs"}
    cost("planning", f"{name}: {units[name]}", work[name], rounds=5 if name == "plan" else 100)
