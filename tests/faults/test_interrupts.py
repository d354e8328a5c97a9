"""An interrupt or an error at every point of an operation: afterwards all calls are eager's, and the process goes on."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch

from omnigraph._recorder import recording
from omnigraph.decoder import GraphedDecoder
from omnigraph.graph import capture
from omnigraph.models import tiny
from omnigraph.shapes import BucketPlan
from tests.faults.interrupting import Interrupt, points

PLAN, OTHER = BucketPlan.grid([1, 2], [8, 5]), BucketPlan.grid([1, 2], [8, 12])
SHAPES = [(1, 8), (1, 5), (2, 8), (1, 7), (3, 8), (2, 3), (1, 12), (1, 40)]
MODULE = tiny(trim=3)


def codes(batch: int, frames: int) -> torch.Tensor:
    return torch.randint(MODULE.config.codebook_size, (batch, MODULE.config.num_quantizers, frames))


def fresh(*, warm: bool = True) -> GraphedDecoder:
    decoder = GraphedDecoder(MODULE, PLAN)
    if warm:
        decoder.warmup(strict=True)
        for shape in SHAPES[:4]:
            decoder.decode(codes(*shape))
    return decoder


def stream(decoder: GraphedDecoder) -> None:
    session = decoder.stream(chunk_size=5, left_context_size=3)
    session.push(codes(1, 7))
    session.flush()


OPERATIONS: dict[str, tuple[Callable[[GraphedDecoder], object], int]] = {
    "an exact hit": (lambda d: d.decode(codes(1, 8)), 40),
    "a shape seen first": (lambda d: d.decode(codes(2, 4)), 40),
    "a split hit": (lambda d: d.decode(codes(3, 8)), 40),
    "an eager call": (lambda d: d.decode(codes(1, 40)), 30),
    "chunks": (lambda d: d.batched_chunked_decode(codes(2, 20), [20, 11], 5, 3), 40),
    "a stream": (stream, 40),
    "warm-up": (lambda d: d.warmup(), 30),
    "other buckets": (lambda d: d.reconfigure(OTHER), 40),
    "fewer buckets": (lambda d: d.reconfigure(BucketPlan.grid([1], [5])), 30),
    "recapture": (lambda d: d.recapture(), 25),
    "close": (lambda d: d.close(), 40),
}


def in_another_thread(call: Callable[[], object]) -> None:
    """Fails where a lock is still held."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "a lock was not released"
    if errors:
        raise errors[0]


def check(decoder: GraphedDecoder) -> None:
    """Every call gives what eager gives, and nothing of the process is left changed."""
    assert gc.isenabled()
    assert not recording()
    assert torch.is_autocast_cache_enabled()
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    for shape in SHAPES:
        x = codes(*shape)
        audio = decoder.decode(x)
        assert audio.shape == MODULE(x).shape
        torch.testing.assert_close(audio, MODULE(x))
    stats = decoder.stats
    assert stats.calls == stats.hits + sum(stats.fallbacks.values())


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("name", OPERATIONS)
def test_wherever_it_is_interrupted(name: str, error: type[BaseException]) -> None:
    operation, most = OPERATIONS[name]
    warm = name != "warm-up"
    counted = fresh(warm=warm)
    for at in points(lambda: operation(counted), most):
        decoder = fresh(warm=warm)
        interrupt = Interrupt(at, error)
        try:
            with interrupt:
                operation(decoder)
        except (error, RuntimeError):
            pass
        if decoder._closed:
            with pytest.raises(RuntimeError, match="closed"):
                decoder.decode(codes(1, 8))
            in_another_thread(decoder.close)
        else:
            try:
                in_another_thread(lambda decoder=decoder: check(decoder))
                decoder.warmup()
                assert set(decoder.captured) <= set(decoder.plan.buckets)  # an error may have cost a bucket
                if error is MemoryError:
                    decoder.recapture()
                assert set(decoder.captured) == set(decoder.plan.buckets)
                check(decoder)
            except BaseException as failure:
                raise AssertionError(f"after {error.__name__} at point {at}, {interrupt.where}") from failure
        x = torch.randn(3)
        assert torch.equal(capture(torch.sin, x).replay(x), x.sin())
