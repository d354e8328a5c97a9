"""Qwen-Image-2.1's transformer: the class of diffusers, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from omnigraph._needs import need
from omnigraph.models._weights import OUTPUT_RMS, fresh
from omnigraph.models.diffusion import image_request, prefill

_SIZES: dict[str, dict[str, Any]] = {
    "default": {},  # 7.1 B parameters: 32 blocks of 32 heads of 128
    "small": {  # 0.2 M, for a CPU; the same structure
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "context_in_dim": 32,
        "axes_dims_rope": (4, 6, 6),
    },
}


def qwen_image(
    size: str = "default",
    *,
    config: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> nn.Module:
    """Make `QwenImage21Transformer2DModel` with random weights, scaled to an output RMS of 0.15.

    Args:
        size: "default" (7.1 B parameters, 14 GB in bfloat16) or "small" (0.2 M, for a CPU; the same structure).
        config: fields of the class's config, instead of a size.
        dtype: of the weights; bfloat16 for "default", float32 for others, unless given. They are drawn in it, on the device.
        device: torch's default device unless given.

    Raises:
        ValueError: a size that does not exist.
        ModuleNotFoundError: diffusers is missing.
    """
    if config is None and size not in _SIZES:
        raise ValueError(f"the sizes are {', '.join(map(repr, _SIZES))}, or give config=; got {size!r}")
    make = need("diffusers").QwenImage21Transformer2DModel
    dtype = dtype or (torch.bfloat16 if config is None and size == "default" else torch.float32)
    usual = torch.get_default_dtype()
    with fresh(seed, torch.device(device) if device is not None else torch.get_default_device()):
        try:
            torch.set_default_dtype(dtype)
            model: nn.Module = make(**(_SIZES[size] if config is None else config)).requires_grad_(False).eval()
        finally:
            torch.set_default_dtype(usual)
        _scale(model, seed)
    return model


@torch.no_grad()
def _scale(model: nn.Module, seed: int) -> None:
    """Strengthen the modulation and sharpen the attention, so that the prefix shows in the output, and bring that to its RMS."""
    parts: Any = model
    parts.modulation[1].weight.mul_(4)
    for block in parts.transformer_blocks:
        block.attn.norm_q.weight.mul_(3)
    request = image_request(model, (4, 4), text_tokens=8, seed=seed)
    velocity, _ = prefill(model, request, "conditional", request.latents, torch.full((1,), 0.5, device=request.latents.device))
    parts.proj_out.weight.mul_(OUTPUT_RMS / velocity.double().pow(2).mean().sqrt().to(velocity.dtype))
