"""Random weights: drawn by seed without touching the caller's generators, and scaled so that errors can be seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from omnigraph._subject import seeded

OUTPUT_RMS = 0.15  # near zero any tolerance passes, at a clamp of 1 errors hide


@contextmanager
def fresh(seed: int, device: torch.device) -> Iterator[None]:
    """Make new tensors on `device`, drawn by `seed`; the caller's generators and default device come back afterwards."""
    with torch.inference_mode(False), seeded(seed, device), device:
        yield


@torch.no_grad()
def scale_output(run: Callable[[Tensor], object], last: nn.Module, num_quantizers: int, codebook_size: int, seed: int) -> None:
    """Scale the last linear layer so that its output has an RMS of `OUTPUT_RMS` on random codes.

    Measured on that layer's output, before any clamp or tanh. `run` takes codes `[1, num_quantizers, 32]`.
    """
    found: list[Tensor] = []
    hook = last.register_forward_hook(lambda module, inputs, output: found.append(output))
    parameters = list(last.parameters())
    random = torch.Generator().manual_seed(seed)
    run(torch.randint(codebook_size, (1, num_quantizers, 32), generator=random, device="cpu").to(parameters[0].device))
    hook.remove()
    factor = OUTPUT_RMS / found[0].double().pow(2).mean().sqrt()
    for parameter in parameters:
        parameter.mul_(factor.to(parameter.dtype))
