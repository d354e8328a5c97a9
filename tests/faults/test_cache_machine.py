"""Everything that can be done to a cache of decode graphs, in random order: each step gives what the model gives then, or goes eager."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

from omnigraph.prefix import DecodeGraphCache
from omnigraph.stats import Fallback
from tests.faults.interrupting import Interrupt
from tests.faults.little import Request, Step, StepAdapter
from tests.faults.test_machine import WHERE

NUMBER = st.integers(0, 11)
CHANGES = ["parameter", "data", "assign", "half and back", "buffer", "hook", "submodule", "train", "state"]


class CacheMachine(RuleBasedStateMachine):
    @initialize(entries=st.integers(1, 3), contention=st.sampled_from(["refresh", "eager"]), limit=st.sampled_from([None, None, 8000]))
    def begin(self, entries: int, contention: Any, limit: int | None) -> None:
        torch.manual_seed(0)
        self.module = Step()
        self.adapter = StepAdapter(self.module)
        self.cache = DecodeGraphCache(self.adapter, max_entries=entries, max_bytes=limit, contention=contention)
        self.requests: list[Request] = []
        self.calls = self.hits = self.refused = self.seed = 0
        self.hooks: list[Any] = []
        self.arrive(3)

    @rule(tokens=st.sampled_from([3, 3, 4, 5]))
    def arrive(self, tokens: int) -> None:
        self.seed += 1
        self.requests.append(Request(self.module, tokens, seed=self.seed))
        self.register(-1)

    @rule(n=NUMBER)
    def register(self, n: int) -> None:
        request = self.requests[n % len(self.requests)]
        refused = self.cache.register_prefill(request.prefix)
        assert request.prefix.key(torch.float32, "math") in self.cache.keys or refused is not None
        self.refused += refused is not None

    @rule(n=NUMBER)
    def leave(self, n: int) -> None:
        if len(self.requests) > 1:
            del self.requests[n % len(self.requests)]

    @rule(first=NUMBER, where=st.sampled_from(["as it is", *WHERE]), tokens=st.integers(6, 9), steps=st.integers(1, 3))
    def decode(self, first: int, where: str, tokens: int, steps: int) -> None:
        first %= len(self.requests)
        for request in (self.requests[first:] + self.requests[:first]) * steps:
            hidden, timestep = request.draw(1, tokens, 4), request.draw(1).abs()
            with WHERE[where]():
                latents, eager = self.cache.try_decode(request.prefix, hidden, timestep), request.eager(hidden[:, -6:], timestep)
            self.calls += 1
            if latents is not None:
                self.hits += 1
                assert not self.adapter.forbidden
                assert (latents.dtype, latents.requires_grad) == (eager.dtype, False)
                assert torch.equal(latents, eager)

    @rule(n=NUMBER, which=st.integers(0, 1), part=st.integers(0, 1))
    def write_to_a_prefix(self, n: int, which: int, part: int) -> None:
        self.requests[n % len(self.requests)].prefix.layers[which][part].mul_(0.5)

    @rule(n=NUMBER, at=st.integers(0, 150), error=st.sampled_from([KeyboardInterrupt, torch.OutOfMemoryError]))
    def break_off(self, n: int, at: int, error: type[BaseException]) -> None:
        request, before = self.requests[n % len(self.requests)], (self.calls, self.hits)
        hidden, timestep = request.draw(1, 6, 4), request.draw(1).abs()
        with suppress(error), Interrupt(at, error):
            self.cache.try_decode(request.prefix, hidden, timestep)
        self.calls, self.hits = self.cache.stats.calls, self.cache.stats.hits  # its end may have been reached
        assert (self.calls - before[0], self.hits - before[1]) in ((0, 0), (1, 0), (1, 1))

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert (self.cache.keys, self.cache.nbytes) == ((), 0)

    @rule(what=st.sampled_from(["capture", "allocation", "obstacle"]), tokens=st.integers(3, 7))
    def fail(self, what: str, tokens: int) -> None:
        """Until the end of this step. What failed is remembered until there is room, or `clear`."""
        self.adapter.failing, self.adapter.full = what == "capture", what == "allocation"
        self.adapter.forbidden = Fallback.FORWARD_HOOKS if what == "obstacle" else None
        self.adapter.mode += what == "obstacle"
        self.arrive(tokens)
        self.decode(-1, "as it is", 6, 1)
        self.adapter.failing = self.adapter.full = False
        self.adapter.forbidden = None
        self.adapter.mode += what == "obstacle"

    @rule(factor=st.sampled_from([0.9, 1.1]))
    def update_weights_in_place(self, factor: float) -> None:
        with torch.no_grad():
            self.module.into.weight.mul_(factor)

    @rule(how=st.sampled_from(CHANGES))
    def change(self, how: str) -> None:
        module = self.module
        if how == "parameter":
            module.into.weight = nn.Parameter(module.into.weight.detach() * 0.9, requires_grad=False)
        elif how == "data":
            module.out.weight.data = module.out.weight.data * 0.9
        elif how == "assign":
            module.load_state_dict({name: value * 0.9 for name, value in module.state_dict().items()}, assign=True)
        elif how == "half and back":
            module.bfloat16().float()
        elif how == "buffer":
            module.shift = module.shift + 0.1
        elif how == "hook" and self.hooks:
            self.hooks.pop().remove()
        elif how == "hook":
            self.hooks.append(module.out.register_forward_hook(lambda module, inputs, output: output * 1.1))
        elif how == "submodule":
            module.into = nn.Linear(4, 8).requires_grad_(False)
        elif how == "train":
            module.train(not module.training)
        else:
            self.adapter.mode += 1
        for n in range(len(self.requests)):
            self.register(n)

    @invariant()
    def it_keeps_to_its_limits_and_counts_each_call_once(self) -> None:
        if hasattr(self, "cache"):
            cache, limit = self.cache, self.cache._entries.max_bytes
            assert len(cache.keys) <= cache._entries.max_entries
            assert limit is None or cache.nbytes <= limit
            assert (cache.stats.calls, cache.stats.hits) == (self.calls, self.hits)
            assert sum(cache.refused.values()) == self.refused

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.clear()
            assert self.cache.nbytes == 0


CacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestCacheMachine = CacheMachine.TestCase
