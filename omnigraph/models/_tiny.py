"""One small decoder with knobs, for tests and teaching: each knob is a way in which real decoders differ or go wrong."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omnigraph.models._weights import fresh, scale_output


class TinyDecoder(nn.Module):
    """Codes `[batch, num_quantizers, frames]` to audio `[batch, channels, frames * upsample - trim]`; make it with `tiny`.

    As in a real causal decoder the `trim` samples go missing at the start: sample s is made from frames
    `floor((s + trim) / upsample) - receptive_field` to `floor((s + trim) / upsample) + lookahead`.
    Set `raise_in = n` and the n-th call from then on raises; set `broken` and every call does.
    """

    offset: Tensor
    count: Tensor

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        width = config.receptive_field + 1 + config.lookahead
        self.embedding = nn.Embedding(config.num_quantizers * config.codebook_size, config.hidden)
        self.register_buffer("offset", torch.arange(config.num_quantizers)[:, None] * config.codebook_size, persistent=False)
        self.context = nn.Conv1d(config.hidden, config.hidden, width)
        self.frequency = nn.Parameter(torch.ones(config.hidden, 1))
        self.upsample = nn.ConvTranspose1d(config.hidden, config.channels, config.upsample, stride=config.upsample)
        self.raise_in = int(config.raise_once)
        self.broken = False
        if config.counter:
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, codes: Tensor) -> Tensor:
        config = self.config
        if self.broken:
            raise RuntimeError("the tiny decoder is broken")
        if self.raise_in:
            self.raise_in -= 1
            if not self.raise_in:
                raise RuntimeError("the tiny decoder raises at this call")
        if config.host_read and codes.max().item() >= config.codebook_size:
            raise ValueError(f"a code of {codes.max().item()} is outside a codebook of {config.codebook_size}")
        audio = self.untrimmed(codes)[..., config.trim :]
        if config.counter:
            self.count.add_(1)
            audio = audio * (1 + 0.1 * torch.sin(self.count.to(audio.dtype)))
        if config.noise:
            audio = audio + 0.01 * torch.randn_like(audio)
        return audio

    def untrimmed(self, codes: Tensor) -> Tensor:
        x = self.embedding(codes + self.offset).sum(1).mT  # [batch, hidden, frames]
        if self.config.mix_rows:
            x = x + x.mean(0, keepdim=True)
        x = self.context(F.pad(x, (self.config.receptive_field, self.config.lookahead)))
        x = x + torch.sin(x * self.frequency).square() / self.frequency  # snake
        audio: Tensor = self.upsample(x)
        return audio


def tiny(
    *,
    num_quantizers: int = 4,
    codebook_size: int = 32,
    hidden: int = 16,
    channels: int = 1,
    upsample: int = 8,
    trim: int = 0,
    receptive_field: int = 3,
    lookahead: int = 0,
    host_read: bool = False,
    raise_once: bool = False,
    counter: bool = False,
    noise: bool = False,
    mix_rows: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> TinyDecoder:
    """Make a `TinyDecoder` with random weights.

    Arguments:
        upsample, trim: samples a frame, and samples missing at the start.
        receptive_field, lookahead: frames of left and right context that a sample depends on.
        host_read: branch on a code's value in `forward`, which no graph can record.
        raise_once: the first call raises.
        counter: keep a count of the calls in a buffer, which changes the output.
        noise: add random numbers.
        mix_rows: let each row of a batch depend on the others.

    >>> tiny(upsample=8, trim=3)(torch.zeros(2, 4, 5, dtype=torch.int64)).shape
    torch.Size([2, 1, 37])
    """
    config = SimpleNamespace(**{k: v for k, v in locals().items() if k not in ("seed", "dtype", "device")})
    if min(num_quantizers, codebook_size, hidden, channels, upsample) < 1 or min(trim, receptive_field, lookahead) < 0:
        raise ValueError(f"sizes must be positive, trim, receptive_field and lookahead not negative; got {config}")
    with fresh(seed, torch.device(device)):
        module = TinyDecoder(config).requires_grad_(False).eval()
        scale_output(module.untrimmed, module.upsample, num_quantizers, codebook_size, seed)
    return module.to(dtype)
