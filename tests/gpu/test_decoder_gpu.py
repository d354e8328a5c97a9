"""`GraphedDecoder` on a GPU, on small decoders and on full-size Code2Wav at the design's 33 shapes."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from omnigraph.compare import Reference, verify
from omnigraph.decoder import GraphedDecoder
from omnigraph.graph import capture
from omnigraph.models import code2wav, tiny
from omnigraph.shapes import Bucket, BucketPlan, Shape
from omnigraph.stats import Fallback, Outcome

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
PLAN = BucketPlan.grid([1, 4], [2, 5, 8])
CALLS = [(1, 5), (4, 8), (1, 3), (1, 6), (3, 5), (5, 8), (6, 7), (8, 1), (1, 9)]
LENGTHS = [2, 4, 8, 16, 25, 32, 50, 64, 128, 256, 325]
FULL = BucketPlan.grid([1, 4, 8], LENGTHS)
PADDED = [(1, 41), (1, 33), (1, 20), (1, 3), (3, 50), (2, 41), (5, 25), (1, 300), (7, 20), (1, 97)]


def flush() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def codes_for(module: nn.Module, batch: int, frames: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 31 * batch + frames)
    size = (batch, module.config.num_quantizers, frames)
    return torch.randint(module.config.codebook_size, size, generator=generator).to(DEVICE)


@torch.no_grad()
def eager(module: nn.Module, codes: Tensor) -> Tensor:
    return module(codes)


@contextmanager
def warm(module: nn.Module, plan: BucketPlan = PLAN, **options: Any) -> Iterator[GraphedDecoder]:
    with GraphedDecoder(module, plan, **options) as decoder:
        decoder.warmup(strict=True)
        yield decoder


def last(decoder: GraphedDecoder) -> Outcome:
    [((_, outcome), count)] = decoder.stats.counts().items()
    assert count == 1
    decoder.stats.reset()
    return outcome


def close_to(audio: Tensor, expected: Tensor) -> bool:
    """For many calls at once, where a reference would take long: of eager's form, and within what other kernels make of it."""
    same = (audio.shape, audio.dtype, audio.device) == (expected.shape, expected.dtype, expected.device)
    return same and float((audio.double() - expected.double()).norm()) <= 5e-3 * float(expected.double().norm()) + 1e-6


@pytest.fixture(autouse=True)
def float32_is_float32(request: pytest.FixtureRequest) -> Iterator[None]:
    """But at full size: a small convolution takes tf32 at one length and float32 at the next, and errors differ a thousandfold."""
    kept = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = kept and "full" in request.fixturenames
    yield
    torch.backends.cudnn.allow_tf32 = kept


@pytest.fixture(scope="module")
def small() -> nn.Module:
    return tiny(trim=3, device=DEVICE)


# -- full size --


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def full(request: pytest.FixtureRequest) -> Iterator[GraphedDecoder]:
    with GraphedDecoder(code2wav(dtype=request.param, device=DEVICE), FULL) as decoder:
        decoder.warmup(strict=True)
        yield decoder
    flush()


def test_full_size_facts(full: GraphedDecoder) -> None:
    assert (full.facts.upsample, full.facts.trim, full.facts.causal, full.facts.rows_independent) == (1920, 555, True, True)
    assert len(full.captured) == 33
    assert full.nbytes > 2**30


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_full_size_exact_calls_are_bitwise_eagers(full: GraphedDecoder, batch: int) -> None:
    for frames in LENGTHS:
        full._live.poison(0)
        codes = codes_for(full.module, batch, frames)
        audio, expected = full.decode(codes), eager(full.module, codes)
        assert last(full).kind == "exact"
        assert expected.shape == (batch, 1, frames * 1920 - 555)
        assert audio.dtype == expected.dtype
        assert torch.equal(audio, expected), frames
        assert 0.02 < float(audio.double().pow(2).mean().sqrt()) < 0.4
        del audio, expected


def test_full_size_padded_calls_are_within_the_rule(full: GraphedDecoder) -> None:
    reference = Reference(full.module)
    for shape in PADDED:
        codes = codes_for(full.module, *shape)
        assert full.decode(codes).shape == (shape[0], 1, shape[1] * 1920 - 555)
        assert last(full).kind in ("padded", "split")
    found = verify(full, PADDED, reference=reference)
    print(found.to_frame()[["shape", "bucket", "bitwise", "error", "eager_error", "ratio"]])
    assert found.ok, str(found)
    assert verify(full, [(1, 4), (4, 50), (1, 400)], reference=reference).ok


# -- small decoders --


def test_every_path(small: nn.Module) -> None:
    with warm(small) as decoder:
        assert decoder.captured == PLAN.buckets
        found = verify(decoder, CALLS)
        assert found.ok, str(found)
        kinds = [row.outcome.kind for row in found.rows]
        assert kinds == ["exact", "exact", "padded", "padded", "split", "split", "split", "split", "fallback"]
        results = [(codes := codes_for(small, *call), decoder.decode(codes)) for call in CALLS]
        kept = [audio.clone() for _, audio in results]
        for codes, _ in results:
            decoder.decode(codes.flip(0))
        assert all(torch.equal(audio, before) for (_, audio), before in zip(results, kept, strict=True))
        assert all(close_to(audio, eager(small, codes)) for codes, audio in results)


@pytest.mark.parametrize("knobs", [{"dtype": torch.bfloat16}, {"lookahead": 2}, {"mix_rows": True}, {"trim": 20}])
def test_other_decoders(knobs: dict[str, Any]) -> None:
    module = tiny(device=DEVICE, **knobs)
    with warm(module) as decoder:
        found = verify(decoder, [call for call in CALLS if call[1] > 2])
        assert found.ok, str(found)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_modes_and_inference_codes(mode: Any) -> None:
    module = tiny(device=DEVICE).requires_grad_(True)
    with mode(), warm(module) as decoder:
        for call in CALLS:
            codes = codes_for(module, *call)
            audio = decoder.decode(codes)
            assert not audio.requires_grad
            assert close_to(audio, eager(module, codes))
    with warm(module) as decoder, torch.inference_mode():
        codes = codes_for(module, 4, 8)
        assert codes.is_inference()
        assert torch.equal(decoder.decode(codes), eager(module, codes))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_call_does_not_synchronize(small: nn.Module) -> None:
    with warm(small) as decoder:
        inputs = [codes_for(small, *call) for call in CALLS[:8]]
        try:
            torch.cuda.set_sync_debug_mode("error")
            results = [decoder.decode(codes) for codes in inputs]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert decoder.stats.hits == 8
        assert all(close_to(audio, eager(small, codes)) for codes, audio in zip(inputs, results, strict=True))


def test_codes_elsewhere_or_out_of_range(small: nn.Module) -> None:
    with warm(small, check_codes=True) as decoder:
        with pytest.raises(ValueError, match=r"on cuda:0; got codes on cpu: move them with .to\('cuda:0'\)"):
            decoder.decode(torch.zeros(1, 4, 5, dtype=torch.int64))
        with pytest.raises(ValueError, match="codes go from 0 to 31; got 0 to 32"):
            decoder.decode(torch.arange(20, device=DEVICE).reshape(1, 4, 5) % 2 * 32)
        assert decoder.stats.calls == 0


def test_a_host_read_fails_every_capture_and_nothing_else(small: nn.Module) -> None:
    module = tiny(host_read=True, device=DEVICE)
    with warm(small) as other, GraphedDecoder(module, PLAN) as decoder:
        report = decoder.warmup()
        assert report.captured == ()
        assert len(report.failed) == len(PLAN)
        assert all(row.error for row in report.rows)
        for call in CALLS:
            codes = codes_for(module, *call)
            assert torch.equal(decoder.decode(codes), eager(module, codes))
        assert decoder.stats.fallbacks == {Fallback.NO_BUCKET: len(CALLS)}
        torch.cuda.empty_cache()
        assert verify(other, CALLS).ok
        with warm(small, BucketPlan.grid([2], [3, 7])) as later:
            assert verify(later, [(2, 3), (2, 6)]).ok


@pytest.mark.parametrize("knob", ["counter", "noise"])
def test_state_and_randomness_mean_no_graphs(knob: str) -> None:
    module = tiny(device=DEVICE, **{knob: True})
    with GraphedDecoder(module, PLAN) as decoder:
        assert decoder.warmup().captured == ()
        decoder.decode(codes_for(module, 1, 5))
        assert last(decoder).reason == Fallback.UNSAFE_MODULE


def test_within_somebody_elses_capture_a_call_goes_eager(small: nn.Module) -> None:
    with warm(small) as decoder:
        static = codes_for(small, 1, 5)
        with torch.cuda.stream(torch.cuda.Stream()):
            eager(small, static)  # so that libraries are ready
        torch.cuda.synchronize()
        theirs = torch.cuda.CUDAGraph()
        with torch.cuda.graph(theirs):
            audio = decoder.decode(static)
        assert last(decoder).reason == Fallback.OUTER_CAPTURE
        for seed in range(3):
            static.copy_(codes_for(small, 1, 5, seed))
            theirs.replay()
            assert torch.equal(audio, eager(small, static))
            assert torch.equal(decoder.decode(static), audio)
        ours = capture(lambda codes: decoder.decode(codes) * 2, static, warmup=0)
        assert torch.equal(ours.replay(static), eager(small, static) * 2)


def test_autocast_and_other_switches_go_eager(small: nn.Module) -> None:
    with warm(small) as decoder:
        codes = codes_for(small, 4, 8)
        with torch.autocast("cuda", torch.bfloat16):
            audio, expected = decoder.decode(codes), eager(small, codes)
        assert last(decoder).reason == Fallback.ENVIRONMENT_CHANGED
        assert audio.dtype == expected.dtype
        assert torch.equal(audio, expected)
        torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
        try:
            audio, expected = decoder.decode(codes), eager(small, codes)
        finally:
            torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
        assert last(decoder).reason == Fallback.ENVIRONMENT_CHANGED
        assert torch.equal(audio, expected)
        assert torch.equal(decoder.decode(codes), eager(small, codes))
        assert last(decoder).kind == "exact"


def test_weights_that_move_go_eager() -> None:
    module = tiny(device=DEVICE)
    with warm(module) as decoder:
        codes = codes_for(module, 1, 5)
        with torch.no_grad():
            module.context.weight.mul_(0.5)
        assert torch.equal(decoder.decode(codes), eager(module, codes))
        assert last(decoder).kind == "exact"
        module.context.weight.data = module.context.weight.data * 2
        assert torch.equal(decoder.decode(codes), eager(module, codes))
        assert last(decoder).reason == Fallback.MODULE_CHANGED
        module.cpu()
        cpu = codes.cpu()
        assert torch.equal(decoder.decode(cpu), eager(module, cpu))
        assert last(decoder).reason == Fallback.MODULE_CHANGED


def test_other_streams(small: nn.Module) -> None:
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    with warm(small) as decoder:
        inputs = [codes_for(small, *call, seed) for seed in range(8) for call in CALLS]
        results = []
        torch.cuda.synchronize()
        for i, codes in enumerate(inputs):
            with torch.cuda.stream(streams[i % 3]):
                results.append(decoder.decode(codes))
        torch.cuda.synchronize()
        assert all(close_to(audio, eager(small, codes)) for codes, audio in zip(inputs, results, strict=True))


@pytest.mark.parametrize("latency", [False, True], ids=["untimed", "timed"])
def test_threads_with_streams_of_their_own_while_the_decoder_is_reconfigured(small: nn.Module, latency: bool) -> None:
    inputs = {(call, seed): codes_for(small, *call, seed) for call in CALLS for seed in range(3)}
    expected = {key: eager(small, codes) for key, codes in inputs.items()}
    plans = [PLAN, BucketPlan.grid([1, 4], [2, 5, 8, 9]), BucketPlan.grid([1], [5]), BucketPlan.grid([2], [4, 9], extra=[(1, 5)])]
    wrong: list[object] = []
    torch.cuda.synchronize()
    with warm(small, latency=latency) as decoder:

        def work(seed: int) -> None:
            rng = random.Random(seed)
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for _ in range(200):
                        key = rng.choice(CALLS), rng.randrange(3)
                        if not close_to(decoder.decode(inputs[key]), expected[key]):
                            wrong.append(key)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for plan in itertools.cycle(plans):
            assert decoder.reconfigure(plan).failed == ()
            if not any(thread.is_alive() for thread in threads):
                break
        for thread in threads:
            thread.join()
        assert wrong == []
        assert decoder.stats.calls == 800


def test_decoders_come_and_go_in_several_threads(small: nn.Module) -> None:
    inputs = {call: codes_for(small, *call) for call in CALLS}
    expected = {call: eager(small, codes) for call, codes in inputs.items()}
    wrong: list[object] = []
    torch.cuda.synchronize()

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(5):
                    with warm(small) as decoder:
                        wrong.extend(call for call in CALLS if not close_to(decoder.decode(inputs[call]), expected[call]))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_pools_bytes_and_what_closing_gives_back() -> None:
    module = tiny(hidden=512, upsample=64, device=DEVICE)  # without matrix products: cuBLAS keeps a workspace for each stream
    plan = BucketPlan.grid([1, 8], [512, 4096])
    with warm(module, plan):
        pass  # kernels are loaded
    flush()
    before = torch.cuda.memory_reserved()
    decoder = GraphedDecoder(module, plan)
    report = decoder.warmup(strict=True)
    flush()
    grown = torch.cuda.memory_reserved() - before
    assert report.nbytes == decoder.nbytes > 0
    assert decoder.nbytes <= grown
    assert grown - decoder.nbytes < 32 * 2**20  # the rest: static inputs
    for call in [(1, 512), (8, 4096), (3, 400)]:
        decoder.decode(codes_for(module, *call))
    freed = decoder.reconfigure(BucketPlan.grid([1], [512])).freed
    flush()
    assert freed > grown // 2
    assert torch.cuda.memory_reserved() - before <= grown - freed + 32 * 2**20
    decoder.close()
    assert (decoder.nbytes, decoder.captured) == (0, ())
    flush()
    assert torch.cuda.memory_reserved() - before < 32 * 2**20


def test_ten_times_over_takes_no_more_memory(small: nn.Module) -> None:
    held = []
    for _ in range(10):
        decoder = GraphedDecoder(small, PLAN)
        decoder.warmup(strict=True)
        for call in CALLS:
            decoder.decode(codes_for(small, *call))
        del decoder  # not closed
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] == held[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="torch.compile on a GPU needs triton, which is not installed")
def test_compiled_buckets() -> None:
    module = tiny(trim=3, device=DEVICE)
    with warm(module, BucketPlan.grid([1, 4], [5, 8], compiled=[(1, 5), (4, 8)])) as decoder:
        assert Bucket(Shape(1, 5), True) in decoder.captured
        found = verify(decoder, [(1, 5), (1, 4), (4, 8), (5, 8), (1, 8)])
        assert found.ok, str(found)
        assert [row.outcome.compiled for row in found.rows] == [True, True, True, True, False]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one() -> None:
    other = torch.device("cuda", 1)
    module = tiny(device=other)
    with GraphedDecoder(module, PLAN) as decoder:
        decoder.warmup(strict=True)
        assert torch.cuda.current_device() == 0
        for call in CALLS:
            codes = codes_for(module, *call).to(other)
            assert close_to(decoder.decode(codes), eager(module, codes))
        with pytest.raises(ValueError, match="on cuda:1; got codes on cuda:0"):
            decoder.decode(codes_for(module, 1, 5))
