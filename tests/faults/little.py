"""Two models for racing and for random orders: a decoder whose arithmetic is exact, and a denoising step of a few operations."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omnigraph.models import TinyDecoder, tiny
from omnigraph.prefix import DecodeBuffers, DecodeGraphKey, Prefix
from omnigraph.stats import Fallback


class Whole(TinyDecoder):
    """The tiny decoder in whole numbers: whatever kernel adds them up, and in which order, the bits are the same."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator))
        self.requires_grad_(False).eval()

    def untrimmed(self, codes: Tensor) -> Tensor:
        x = self.embedding(codes + self.offset).sum(1).mT
        audio: Tensor = self.upsample(self.context(F.pad(x, (self.config.receptive_field, self.config.lookahead))))
        return audio


def whole(device: torch.device | str = "cpu", **knobs: int) -> Whole:
    """With sums below 2**24, which float32 holds exactly."""
    return Whole(tiny(hidden=4, codebook_size=16, **knobs).config).to(device)


class Step(nn.Module):
    """One denoising step: the latents attend to the prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("shift", torch.full((8,), 0.5))
        self.requires_grad_(False).eval()

    def forward(self, hidden: Tensor, timestep: Tensor, layers: Any, freqs: Any) -> Tensor:
        x = self.into(hidden) * timestep[:, None, None] + self.shift
        for key, value in layers:
            x = x + (x @ key.mT).tanh() @ value + freqs[0]
        velocity: Tensor = self.out(x)
        return velocity


class StepAdapter:
    """A `DecodeAdapter` of `Step` with switches: what `state` and `obstacle` say, and which captures fail."""

    compiled = False

    def __init__(self, module: Step) -> None:
        self.module = module
        self.mode = 0
        self.forbidden: Fallback | None = None
        self.failing = self.full = False  # the next captures, the next allocations

    def attention(self) -> str:
        return "math"

    def state(self) -> object:
        return self.mode

    def obstacle(self) -> Fallback | None:
        return self.forbidden

    def buffers(self, key: DecodeGraphKey, prefix: Prefix) -> DecodeBuffers:
        if self.full:
            raise torch.OutOfMemoryError("on purpose")
        return DecodeBuffers.like(prefix, tokens=6, channels=4, dtype=key.dtype)

    def step(self, buffers: DecodeBuffers) -> Tensor:
        if self.failing:
            raise RuntimeError("on purpose")
        velocity: Tensor = self.module(*buffers)
        return velocity


_SEEDS = count()


class Request:
    """A request in the middle of its denoising. `tokens` of prefix: those that agree share a key."""

    def __init__(self, module: Step, tokens: int, device: torch.device | str = "cpu", seed: int | None = None) -> None:
        self.module = module
        self.generator = torch.Generator().manual_seed(next(_SEEDS) if seed is None else seed)
        layers = tuple((self.draw(1, tokens, 8).to(device), self.draw(1, tokens, 8).to(device)) for _ in range(2))
        self.prefix = Prefix("conditional", layers, ((1, 2, 3),), (self.draw(6, 8).to(device),))

    def draw(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator)

    @torch.no_grad()
    def eager(self, hidden: Tensor, timestep: Tensor) -> Tensor:
        velocity: Tensor = self.module(hidden, timestep, self.prefix.layers, self.prefix.freqs)
        return velocity
