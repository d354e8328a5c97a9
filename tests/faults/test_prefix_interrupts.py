"""An interrupt or an error anywhere in a decode-graph cache: later steps are eager's, and nobody reads the prefix of another."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from omnigraph._recorder import recording
from omnigraph.models import QwenImageAdapter, qwen_image
from omnigraph.models.diffusion import decode, image_request, prefill
from omnigraph.prefix import DecodeGraphCache
from tests.faults.interrupting import Interrupt, points
from tests.faults.test_interrupts import in_another_thread

TIME = torch.tensor([0.5])


class Request:
    def __init__(self, model: nn.Module, seed: int, size: tuple[int, int] = (4, 4)) -> None:
        self.model, self.asked = model, image_request(model, size, text_tokens=6, seed=seed)
        self.prefix = prefill(model, self.asked, "conditional", self.asked.latents, TIME)[1]
        self.eager: Tensor = decode(model, self.asked, self.prefix, self.asked.latents, TIME)

    def step(self, cache: DecodeGraphCache) -> Tensor | None:
        found = cache.try_decode(self.prefix, self.asked.latents, TIME)
        assert found is None or torch.equal(found, self.eager)
        return found


@pytest.fixture(scope="module")
def requests() -> Iterator[list[Request]]:
    from diffusers import attention_backend

    with attention_backend("native"), torch.no_grad():
        model = qwen_image("small", seed=1)
        yield [Request(model, 0), Request(model, 1), Request(model, 2, (2, 4))]


def warm(requests: list[Request], **limits: int) -> DecodeGraphCache:
    """A cache that serves the first two requests, which share a key."""
    cache = DecodeGraphCache(QwenImageAdapter(requests[0].model), **limits)
    for request in requests[:2]:
        assert cache.register_prefill(request.prefix) is None
        assert request.step(cache) is not None
    return cache


OPERATIONS: dict[str, tuple[Callable[[DecodeGraphCache, list[Request]], object], int]] = {
    "a prefill that registers": (lambda cache, r: cache.register_prefill(r[2].prefix), 20),
    "a first step": (lambda cache, r: (cache.register_prefill(r[2].prefix), r[2].step(cache)), 20),
    "a hit": (lambda cache, r: r[1].step(cache), 20),
    "a change of owner": (lambda cache, r: r[0].step(cache), 20),
    "an eviction": (lambda cache, r: (cache.register_prefill(r[2].prefix), r[2].step(cache)), 20),
    "clear": (lambda cache, r: cache.clear(), 20),
}


def check(cache: DecodeGraphCache, requests: list[Request]) -> None:
    assert gc.isenabled()
    assert not recording()
    for request in (*requests, *requests):
        request.step(cache)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("name", OPERATIONS)
def test_wherever_it_is_interrupted(name: str, error: type[BaseException], requests: list[Request]) -> None:
    operation, most = OPERATIONS[name]
    limits = {"max_entries": 1} if name == "an eviction" else {}
    counted = warm(requests, **limits)
    for at in points(lambda: operation(counted, requests), most):
        cache = warm(requests, **limits)
        interrupt = Interrupt(at, error)
        try:
            with interrupt:
                operation(cache, requests)
        except error:
            pass
        try:
            in_another_thread(lambda cache=cache: check(cache, requests))
            for request in requests:  # and again with graphs, each in its turn
                cache.clear()
                assert cache.register_prefill(request.prefix) is None
                assert request.step(cache) is not None
            assert cache.nbytes > 0
        except BaseException as failure:
            raise AssertionError(f"after {error.__name__} at point {at}, {interrupt.where}") from failure
