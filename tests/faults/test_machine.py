"""Everything that can be done to a decoder, in random order: each call gives what its module gives then."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

from omnigraph.decoder import GraphedDecoder
from omnigraph.models import tiny
from omnigraph.shapes import BucketPlan, Shape

PLANS = [
    BucketPlan.grid([1], [4]),
    BucketPlan.grid([1, 2], [4, 8]),
    BucketPlan.grid([2], [6]),
    BucketPlan.grid([1, 3], [8, 12]),
]
WHERE: dict[str, Any] = {
    "as it is": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": lambda: Deterministic(),
}


class Deterministic(AbstractContextManager[None]):
    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


class Louder(nn.Conv1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class DecoderMachine(RuleBasedStateMachine):
    @initialize(trim=st.sampled_from([0, 3]), plan=st.sampled_from(PLANS), padding=st.sampled_from(["auto", "exact"]))
    def begin(self, trim: int, plan: BucketPlan, padding: Any) -> None:
        self.module = tiny(trim=trim)
        self.padding = padding
        self.hooks: list[Any] = []
        self.calls = 0
        self.decoder = GraphedDecoder(self.module, plan, padding=padding)

    def teardown(self) -> None:
        if hasattr(self, "decoder"):
            self.decoder.close()

    @rule(batch=st.integers(1, 4), frames=st.integers(1, 14), where=st.sampled_from([*WHERE]), seed=st.integers(0, 9))
    def decode(self, batch: int, frames: int, where: str, seed: int) -> None:
        codes = torch.randint(32, (batch, 4, frames), generator=torch.Generator().manual_seed(seed))
        with WHERE[where]():
            served = self.decoder.served(Shape(batch, frames))
            found, expected = self.decoder.decode(codes), self.module(codes)
        self.calls += 1
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        if served.kind in ("exact", "fallback"):
            assert torch.equal(found, expected), served
        else:
            torch.testing.assert_close(found, expected)

    @rule(plan=st.sampled_from(PLANS))
    def reconfigure(self, plan: BucketPlan) -> None:
        report = self.decoder.reconfigure(plan)
        assert set(self.decoder.captured) == set(plan.buckets), report

    @rule()
    def warm_up(self) -> None:
        self.decoder.warmup(strict=True) if not self.decoder.captured else self.decoder.warmup()

    @rule()
    def recapture(self) -> None:
        self.decoder.recapture()
        assert set(self.decoder.captured) == set(self.decoder.plan.buckets)

    @rule(first=st.integers(1, 12))
    def fail_in_a_capture(self, first: int) -> None:
        self.module.raise_in = first
        with suppress(RuntimeError):  # the probe met it; otherwise the report has it
            report = self.decoder.recapture()
            assert len(report.captured) + len([row for row in report.failed if row.captured is None]) == len(self.decoder.plan)
        self.module.raise_in = 0

    @rule(factor=st.sampled_from([0.9, 1.1]))
    def update_weights_in_place(self, factor: float) -> None:
        with torch.no_grad():
            self.module.context.weight.mul_(factor)

    @rule(how=st.sampled_from(["parameter", "data", "state", "assign", "half and back", "buffer"]))
    def change_weights(self, how: str) -> None:
        module = self.module
        if how == "parameter":
            module.context.weight = nn.Parameter(module.context.weight.detach() * 0.9, requires_grad=False)
        elif how == "data":
            module.upsample.weight.data = module.upsample.weight.data * 0.9
        elif how in ("state", "assign"):
            state = {name: value * 0.9 if value.is_floating_point() else value.clone() for name, value in module.state_dict().items()}
            module.load_state_dict(state, assign=how == "assign")
        elif how == "half and back":
            module.bfloat16().float()
        else:
            module.offset = module.offset.clone()

    @rule()
    def add_a_hook(self) -> None:
        self.hooks.append(self.module.context.register_forward_hook(lambda module, inputs, output: output * 1.01))

    @rule()
    def remove_a_hook(self) -> None:
        if self.hooks:
            self.hooks.pop().remove()

    @rule()
    def replace_a_submodule(self) -> None:
        kind = nn.Conv1d if isinstance(self.module.context, Louder) else Louder
        replacement = kind(16, 16, 4).requires_grad_(False)
        replacement.load_state_dict(self.module.context.state_dict())
        self.module.context = replacement
        self.hooks.clear()

    @rule(on=st.booleans())
    def train(self, on: bool) -> None:
        self.module.train(on)

    @rule(on=st.booleans())
    def enable(self, on: bool) -> None:
        self.decoder.enabled = on

    @rule()
    def close_and_make_another(self) -> None:
        self.decoder.close()
        self.decoder.close()
        with pytest.raises(RuntimeError, match="closed"):
            self.decoder.decode(torch.zeros(1, 4, 4, dtype=torch.int64))
        self.calls = 0
        self.decoder = GraphedDecoder(self.module, self.decoder.plan, padding=self.padding)

    @invariant()
    def every_call_is_counted_once(self) -> None:
        if hasattr(self, "decoder"):
            assert self.decoder.stats.calls == self.calls


DecoderMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestDecoderMachine = DecoderMachine.TestCase
