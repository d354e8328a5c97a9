"""Code2Wav, the speech decoder of Qwen3-Omni: the class of transformers, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from omnigraph._needs import need
from omnigraph.models._weights import fresh, scale_output

_SIZES: dict[str, dict[str, Any]] = {
    "default": {},  # 216 M parameters, a window of 72 frames in each of 8 layers, 1,920 samples a frame less 555
    "small": {
        "codebook_size": 256,
        "num_quantizers": 8,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "sliding_window": 16,
        "decoder_dim": 32,
        # So that signals keep the size that they have at the default width, and attention can be seen in the output.
        "initializer_range": 0.12,
        "layer_scale_initial_scale": 0.3,
    },
}


def code2wav(
    size: str = "default",
    *,
    config: Mapping[str, Any] | Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> nn.Module:
    """Make `Qwen3OmniMoeCode2Wav` with random weights, scaled to an output RMS of 0.15.

    Codes `[batch, quantizers, frames]` to audio `[batch, 1, frames * 1920 - 555]`.

    Arguments:
        size: "default" (216 M parameters) or "small" (0.3 M, for a CPU; the same structure, upsample and trim).
        config: a Qwen3OmniMoeCode2WavConfig of your own, or a mapping of its fields, instead of a size.
        dtype, device: of the weights, float32 on torch's default device unless given. Weights are drawn on the device.

    Raises:
        ValueError: a size that does not exist.
        ModuleNotFoundError: transformers is missing.
    """
    if config is None:
        if size not in _SIZES:
            raise ValueError(f"the sizes are {', '.join(map(repr, _SIZES))}, or give config=; got {size!r}")
        config = _SIZES[size]
    model = "transformers.models.qwen3_omni_moe."
    if isinstance(config, Mapping):
        config = need(f"{model}configuration_qwen3_omni_moe").Qwen3OmniMoeCode2WavConfig(**config)
    make = need(f"{model}modeling_qwen3_omni_moe").Qwen3OmniMoeCode2Wav
    with fresh(seed, torch.device(device) if device is not None else torch.get_default_device()):
        module: nn.Module = make(config).requires_grad_(False).eval()
        last = module.get_submodule(f"decoder.{len(config.upsample_rates) + 2}")
        scale_output(module, last, config.num_quantizers, config.codebook_size, seed)
    return module if dtype is None else module.to(dtype)
