"""The decoder of the speech codec: codebooks, a transformer that looks back over a window, causal transposed convolutions, snakes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class SpeechConfig:
    """The sizes of a speech codec.

    Arguments:
        window: frames that a frame attends to in each layer, itself included.
        rates: by how much each transposed convolution lengthens; `channels` has how many channels each gives.
        encoder_layers: of the encoder's own transformer.
    """

    sample_rate: int = 16_000
    num_quantizers: int = 8
    codebook_size: int = 1024
    codebook_dim: int = 64
    hidden: int = 192
    heads: int = 4
    layers: int = 4
    window: int = 16
    rates: tuple[int, ...] = (8, 5, 4, 2)
    channels: tuple[int, ...] = (128, 64, 32, 24)
    dilations: tuple[int, ...] = (1, 3, 9)
    encoder_layers: int = 2

    @classmethod
    def read(cls, sizes: Mapping[str, Any]) -> SpeechConfig:
        """From what a JSON file gives back of `asdict(config)`."""
        read: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in sizes.items()}
        return cls(**read)

    @property
    def upsample(self) -> int:
        """Samples a frame."""
        return math.prod(self.rates)

    @property
    def trim(self) -> int:
        """Samples missing at the start: each transposed convolution but the first drops its first `rate`."""
        return sum(math.prod(self.rates[i:]) for i in range(1, len(self.rates)))

    @property
    def frame_rate(self) -> float:
        """Frames a second."""
        return self.sample_rate / self.upsample


class Snake(nn.Module):
    """`x + sin(a x)^2 / a` with an `a` for each channel (Ziyin et al., NeurIPS 2020)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.log_a = nn.Parameter(torch.zeros(channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        a = self.log_a.exp().to(x.dtype)
        return x + torch.sin(x * a).square() / a


class CausalConv(nn.Conv1d):
    """A convolution of stride 1 that sees no later sample."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (self.dilation[0] * (self.kernel_size[0] - 1), 0)))


class CausalUpsample(nn.ConvTranspose1d):
    """`[B, C, n]` to `[B, D, n * rate]`, less the first `rate` samples where they are trimmed; sample s sees s // rate and one before."""

    def __init__(self, channels: int, out_channels: int, rate: int, trimmed: bool) -> None:
        super().__init__(channels, out_channels, 2 * rate, stride=rate)
        self.first = rate if trimmed else 0

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        return super().forward(x)[..., self.first : -self.stride[0]]


class Residual(nn.Module):
    """`x + out(snake(conv(snake(x))))`, `out` of kernel 1."""

    def __init__(self, channels: int, conv: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(Snake(channels), conv, Snake(channels))
        self.out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.out(self.inner(x))
        return x + inner


class Layer(nn.Module):
    """Attention over the window and an MLP, normed before (RMS), with rotary positions (Su et al., 2021)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(hidden, eps=1e-6), nn.RMSNorm(hidden, eps=1e-6)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.mlp = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))

    def forward(self, x: Tensor, turn: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, heads, n, d]
        attended = F.scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        mlp: Tensor = self.mlp(self.norm_mlp(x))
        return x + mlp


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn the halves of `[..., n, d]` by the angles `turn` `[n, d / 2]`."""
    a, b = x.chunk(2, -1)
    cos, sin = turn.cos().to(x.dtype), turn.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Transformer(nn.Module):
    """`[B, hidden, n]` to the same; frame k sees frames from `k - layers * (window - 1)` to k."""

    def __init__(self, hidden: int, heads: int, layers: int, window: int) -> None:
        super().__init__()
        self.window, self.angles = window, hidden // heads // 2
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[-1], device=x.device)
        back = at[:, None] - at
        mask = (back >= 0) & (back < self.window)
        turn = at[:, None] * torch.exp(torch.arange(self.angles, device=x.device) * (-math.log(1000.0) / self.angles))
        h = x.mT
        for layer in self.layers:
            h = layer(h, turn, mask)
        out: Tensor = self.norm(h).mT
        return out


class SpeechDecoder(nn.Module):
    """Codes `[B, num_quantizers, n]` to audio `[B, 1, n * upsample - trim]`, causal.

    Sample s is made from frame `(s + trim) // upsample` and those before it.
    """

    offset: Tensor

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.config = c = config
        self.codebooks = nn.Parameter(torch.randn(c.num_quantizers, c.codebook_size, c.codebook_dim) / math.sqrt(c.num_quantizers))
        self.register_buffer("offset", torch.arange(c.num_quantizers)[:, None] * c.codebook_size, persistent=False)
        self.input = CausalConv(c.codebook_dim, c.hidden, 3)
        self.transformer = Transformer(c.hidden, c.heads, c.layers, c.window)
        stages: list[nn.Module] = []
        for i, (before, after, rate) in enumerate(zip((c.hidden, *c.channels), c.channels, c.rates, strict=False)):
            stages += [Snake(before), CausalUpsample(before, after, rate, trimmed=i > 0)]
            stages += [Residual(after, CausalConv(after, after, 7, dilation=d)) for d in c.dilations]
        self.upsample = nn.Sequential(*stages, Snake(c.channels[-1]))
        self.output = CausalConv(c.channels[-1], 1, 7)

    def forward(self, codes: Tensor) -> Tensor:
        latents = F.embedding(codes + self.offset, self.codebooks.flatten(0, 1)).sum(1).mT
        return self.synthesise(latents)

    def synthesise(self, latents: Tensor) -> Tensor:
        """Sums of codebook vectors `[B, codebook_dim, n]` to audio."""
        x = self.input(latents)
        return torch.tanh(self.output(self.upsample(x + self.transformer(x))))
