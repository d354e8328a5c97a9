"""Calling somebody's module for a look, so that nothing of it stays: buffers, modes and random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Start torch's generators for the CPU and `device` at `seed`, and put them back as they were afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


class Subject:
    """A module that is called always from the same buffers and random numbers; `restore` leaves it as it was."""

    def __init__(self, module: nn.Module, num_quantizers: int, codebook_size: int) -> None:
        self.module, self.num_quantizers, self.codebook_size = module, num_quantizers, codebook_size
        self.random = torch.Generator().manual_seed(0)
        first = next(module.parameters(), next(module.buffers(), None))
        self.device = torch.device("cpu") if first is None else first.device
        self.training = [(m, m.training) for m in module.modules()]
        self.buffers = [(m, name, b, None if b is None else b.clone()) for m in module.modules() for name, b in m._buffers.items()]
        self.wrote = False  # a call changed a buffer
        self.channels, self.dtype = 0, torch.float32
        self.upsample, self.trim = 0, 0

    def draw(self, frames: int) -> Tensor:
        """Codes `[1, num_quantizers, frames]`, none of them 0, so that a 0 is a change."""
        return torch.randint(1, self.codebook_size, (1, self.num_quantizers, frames), generator=self.random, device="cpu")

    def change(self, codes: Tensor, first: int, last: int, to_zero: bool) -> Tensor:
        """Another code in every quantizer of the frames first:last."""
        step = torch.randint(1, self.codebook_size, codes[..., first:last].shape, generator=self.random, device="cpu")
        changed = codes.clone()
        changed[..., first:last] = 0 if to_zero else (codes[..., first:last] + step) % self.codebook_size
        return changed

    def __call__(self, codes: Tensor, seed: int = 0) -> Tensor:
        self.restore()
        self.module.eval()
        try:
            with seeded(seed, self.device):
                return self._checked(self.module(codes.to(self.device, copy=True)), codes).clone()
        except Exception as error:
            error.add_note(f"when the probe called {type(self.module).__name__} with codes {list(codes.shape)}")
            raise

    def _checked(self, audio: object, codes: Tensor) -> Tensor:
        if not isinstance(audio, Tensor):
            raise TypeError(f"a decoder must return one tensor [batch, channels, samples], this one returned a {type(audio).__name__}")
        batch, frames = codes.shape[0], codes.shape[-1]
        if audio.dim() != 3 or len(audio) != batch or not audio.numel() or not audio.is_floating_point():
            raise ValueError(
                f"a decoder must return floating point audio [{batch}, channels, samples], not empty, for codes {list(codes.shape)}; "
                f"this one returned {audio.dtype} {list(audio.shape)}"
            )
        self.channels, self.dtype = (self.channels or audio.shape[1]), (self.dtype if self.channels else audio.dtype)
        if (audio.shape[1], audio.dtype) != (self.channels, self.dtype):
            raise ValueError(f"a call gave {self.channels} channels of {self.dtype}, another {audio.shape[1]} of {audio.dtype}")
        if self.upsample and audio.shape[-1] != frames * self.upsample - self.trim:
            raise ValueError(
                f"a call on n frames must give n * upsample - trim samples; two calls say n * {self.upsample} - {self.trim}, "
                f"which is {frames * self.upsample - self.trim} for {frames} frames, but this one gave {audio.shape[-1]}"
            )
        if not audio.isfinite().all():
            raise ValueError(f"{int((~audio.isfinite()).sum())} of {audio.numel()} samples are not finite, so nothing can be compared")
        return audio

    def restore(self) -> None:
        known = {(m, name) for m, name, _, _ in self.buffers}
        for m in self.module.modules():
            for name in [name for name in m._buffers if (m, name) not in known]:
                delattr(m, name)
        for m, name, buffer, value in self.buffers:
            kept = m._buffers.get(name) is buffer
            if buffer is not None and value is not None and not torch.equal(buffer, value):
                kept = False
                with torch.inference_mode():  # there an in-place change is legal for every tensor
                    buffer.copy_(value)
            if not kept:
                self.wrote = True
                m._buffers[name] = buffer
        for m, training in self.training:
            m.training = training
