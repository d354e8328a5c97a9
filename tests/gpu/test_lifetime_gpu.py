"""Device memory, measured: it returns when a decoder is closed or dropped, whoever still holds an error; ten runs take what one does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from omnigraph.decoder import GraphedDecoder
from omnigraph.models import tiny
from omnigraph.prefix import DecodeGraphCache
from omnigraph.shapes import BucketPlan
from tests.faults.interrupting import Interrupt, points
from tests.faults.little import Request, Step, StepAdapter
from tests.faults.memory import all_that_is_left, little_memory

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
PLAN = BucketPlan.grid([1, 8], [512, 2048])
OTHER = BucketPlan.grid([1], [512, 1024])
SLACK = 2**20  # what libraries and torch keep of their own


@pytest.fixture(scope="module")
def module() -> nn.Module:
    """Some 100 MiB of graphs, and no matrix products: cuBLAS keeps a workspace for each stream."""
    module = tiny(hidden=256, upsample=64, device=DEVICE)
    with GraphedDecoder(module, PLAN) as decoder:  # kernels are loaded
        decoder.warmup(strict=True)
        use(decoder)
    return module


def use(decoder: GraphedDecoder) -> None:
    for batch, frames in [(1, 512), (8, 2048), (3, 400), (9, 512), (1, 3000)]:
        decoder.decode(torch.randint(32, (batch, 4, frames), device=DEVICE))
    decoder.batched_chunked_decode(torch.randint(32, (3, 4, 700), device=DEVICE), [700, 300, 20], 200, 25)


def allocated() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def reserved() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["closed", "dropped", "with an error kept", "stats kept"])
def test_ten_times_over_without_the_collector(module: nn.Module, how: str) -> None:
    kept: list[object] = []
    held = []
    with no_collector():
        before = allocated(), reserved()
        for _ in range(10):
            decoder = GraphedDecoder(module, PLAN, check_codes=True)
            kept.append(decoder.warmup(strict=True))
            assert allocated() > before[0] + SLACK
            use(decoder)
            if how == "with an error kept":
                with pytest.raises(ValueError, match="codes go from") as caught:
                    decoder.decode(torch.full((1, 4, 512), 32, device=DEVICE))
                kept.append(caught.value)
                decoder.close()
            elif how == "closed":
                decoder.close()
            else:
                kept.append(decoder.stats)
                del decoder
            held.append((allocated() - before[0], reserved() - before[1]))
        print(how, [(a // 1024, r // 1024) for a, r in held])
        assert max(a for a, _ in held) < SLACK
        assert max(r for _, r in held) < 32 * SLACK
        assert held[-1] == held[2]


def test_a_cycle_is_freed_by_close_and_a_dropped_one_by_the_collector(module: nn.Module) -> None:
    with no_collector():
        before = allocated()
        decoder = GraphedDecoder(module, PLAN)
        decoder.me = decoder
        decoder.warmup(strict=True)
        use(decoder)
        decoder.close()
        assert allocated() - before < SLACK
        del decoder
        decoder = GraphedDecoder(module, PLAN)
        decoder.me = decoder
        decoder.warmup(strict=True)
        del decoder
        assert allocated() - before > SLACK
        gc.collect()
        assert allocated() - before < SLACK


def test_reconfigured_back_and_forth(module: nn.Module) -> None:
    with no_collector(), GraphedDecoder(module, PLAN) as decoder:
        decoder.warmup(strict=True)
        held = []
        for _ in range(10):
            decoder.reconfigure(OTHER)
            use(decoder)
            small = reserved()
            decoder.reconfigure(PLAN)
            use(decoder)
            held.append((small, reserved()))
        print([(a // 2**20, b // 2**20) for a, b in held])
        assert held[-1][0] <= held[1][0] + 32 * SLACK
        assert held[-1][1] <= held[1][1] + 32 * SLACK
        assert held[-1][0] < held[-1][1]


def test_an_out_of_memory_error_that_is_kept_keeps_no_memory(module: nn.Module) -> None:
    """The copy-out fails; the frames of the error held the static output."""
    with no_collector():
        before = allocated()
        decoder = GraphedDecoder(module, PLAN)
        decoder.warmup(strict=True)
        codes = torch.randint(32, (8, 4, 2048), device=DEVICE)
        for _ in range(2):
            with little_memory(DEVICE):
                hog = all_that_is_left(DEVICE)
                with pytest.raises(torch.OutOfMemoryError) as caught:
                    decoder.decode(codes)
                del hog
            assert torch.equal(decoder.decode(codes), module(codes))
        del codes
        decoder.close()
        assert caught.value.__traceback__ is not None
        assert allocated() - before < SLACK


def test_an_interrupted_warm_up_keeps_no_memory(module: nn.Module) -> None:
    plan = BucketPlan.grid([1], [64, 128])
    with no_collector():
        before = reserved()
        for at in points(lambda: GraphedDecoder(module, plan).warmup(), 25):
            decoder, interrupt = GraphedDecoder(module, plan), Interrupt(at)
            with pytest.raises(KeyboardInterrupt) as caught, interrupt:
                decoder.warmup()
            decoder.close()
            assert not torch.cuda.is_current_stream_capturing()
            assert allocated() >= 0
            print(at, interrupt.where, (reserved() - before) // 1024, "KiB")
            assert reserved() - before < 32 * SLACK
            assert caught.value is not None
        with GraphedDecoder(module, plan) as decoder:
            decoder.warmup(strict=True)


@pytest.mark.parametrize("end", [lambda cache: cache.clear(), None], ids=["cleared", "dropped"])
def test_a_cache_gives_back_what_it_took(end: Callable[[DecodeGraphCache], None] | None) -> None:
    module = Step().to(DEVICE)

    def run(n: int) -> DecodeGraphCache:
        cache = DecodeGraphCache(StepAdapter(module), max_entries=4)
        for tokens in range(1000, 1000 + n):  # each a key of its own: older ones go
            request = Request(module, tokens, DEVICE)
            assert cache.register_prefill(request.prefix) is None
            hidden, timestep = request.draw(1, 6, 4).to(DEVICE), torch.ones(1, device=DEVICE)
            latents = cache.try_decode(request.prefix, hidden, timestep)
            assert latents is not None
            assert torch.equal(latents, request.eager(hidden, timestep))
        return cache

    run(2).clear()
    with no_collector():
        before = allocated()
        held = []
        for _ in range(5):
            cache = run(30)
            if end is not None:
                end(cache)
            del cache
            held.append(allocated() - before)
        print([n // 1024 for n in held])
        assert held[-1] == held[1]
        assert held[-1] < 32 * SLACK
