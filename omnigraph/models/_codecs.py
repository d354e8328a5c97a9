"""The decoders of Mimi, EnCodec and DAC: the classes of transformers, with random weights, behind `forward(codes) -> audio`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from omnigraph._needs import need
from omnigraph.models._weights import fresh, scale_output

_ENCODER = ("encoder", "encoder_transformer", "downsample")
_MIMI = {
    "codebook_size": 256,
    "codebook_dim": 32,
    "num_quantizers": 8,
    "vector_quantization_hidden_dimension": 32,
    "hidden_size": 64,
    "num_filters": 4,
    "upsample_groups": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "sliding_window": 16,
    "initializer_range": 0.1,
    "layer_scale_initial_scale": 0.3,
}
_ENCODEC: dict[str, dict[str, Any]] = {
    "24khz": {"codebook_size": 256, "hidden_size": 32, "num_filters": 4, "target_bandwidths": (1.5, 3.0, 6.0)},
}
_ENCODEC["48khz"] = _ENCODEC["24khz"] | {
    "use_causal_conv": False,
    "norm_type": "time_group_norm",
    "audio_channels": 2,
    "sampling_rate": 48_000,
}
_DAC = {
    "codebook_size": 256,
    "n_codebooks": 8,
    "encoder_hidden_size": 4,
    "decoder_hidden_size": 64,
    "downsampling_ratios": (2, 4, 5, 8),
    "sampling_rate": 24_000,
}


class _Codec(nn.Module):
    """The decoding half of a codec model, as a pure function of the codes `[batch, num_quantizers, frames]`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        for name in _ENCODER:
            if name in model._modules:
                delattr(model, name)
        self.model = model
        self.config = model.config
        if not hasattr(self.config, "num_quantizers"):
            self.config.num_quantizers = self.config.n_codebooks  # DAC's word


class MimiDecoder(_Codec):
    def forward(self, codes: Tensor) -> Tensor:
        audio: Tensor = self.model.decode(codes)[0]
        return audio


class EncodecDecoder(_Codec):
    def forward(self, codes: Tensor) -> Tensor:
        audio: Tensor = self.model.decode(codes[None], [None])[0]
        return audio


class DacDecoder(_Codec):
    def forward(self, codes: Tensor) -> Tensor:
        audio: Tensor = self.model.decode(audio_codes=codes)[0]
        return audio[:, None]


def mimi(
    *, config: Mapping[str, Any] | Any = None, dtype: torch.dtype | None = None, device: torch.device | str | None = None, seed: int = 0
) -> nn.Module:
    """Make the decoder of `MimiModel` with random weights: causal, `frames * 1920` samples.

    Arguments:
        config: a MimiConfig or a mapping of its fields, `{}` for the published one; a small one unless given.
        dtype, device: of the weights, float32 on torch's default device unless given.
    """
    return _make("Mimi", MimiDecoder, _MIMI if config is None else config, dtype, device, seed)


def encodec(
    variant: Literal["24khz", "48khz"] = "24khz",
    *,
    config: Mapping[str, Any] | Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> nn.Module:
    """Make the decoder of `EncodecModel` with random weights: `frames * 320` samples.

    Arguments:
        variant: "24khz", mono, with causal convolutions that mirror the first frames of a call into the padding before them; or
            "48khz", stereo, with convolutions that look ahead and norms over all of a call.
        config: an EncodecConfig or a mapping of its fields, `{}` for the published one at 24 kHz, instead of a variant.
        dtype, device: of the weights, float32 on torch's default device unless given.
    """
    if config is None:
        if variant not in _ENCODEC:
            raise ValueError(f"the variants are {', '.join(map(repr, _ENCODEC))}, or give config=; got {variant!r}")
        config = _ENCODEC[variant]
    return _make("Encodec", EncodecDecoder, config, dtype, device, seed)


def dac(
    *, config: Mapping[str, Any] | Any = None, dtype: torch.dtype | None = None, device: torch.device | str | None = None, seed: int = 0
) -> nn.Module:
    """Make the decoder of `DacModel` with random weights: looks ahead, `frames * 320 - 8` samples.

    Arguments:
        config: a DacConfig or a mapping of its fields, `{}` for the published one at 16 kHz; a small one at 24 kHz unless given.
        dtype, device: of the weights, float32 on torch's default device unless given.
    """
    return _make("Dac", DacDecoder, _DAC if config is None else config, dtype, device, seed)


def _make(
    name: str,
    decoder: type[_Codec],
    config: Mapping[str, Any] | Any,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    seed: int,
) -> nn.Module:
    transformers = need("transformers")
    if isinstance(config, Mapping):
        config = getattr(transformers, f"{name}Config")(**config)
    with fresh(seed, torch.get_default_device() if device is None else torch.device(device)):
        model = getattr(transformers, f"{name}Model")(config)
        module = decoder(model).requires_grad_(False).eval()
        _let_codes_be_heard(module)
        _fix_padding(module)
        last = [part for part in model.decoder.modules() if isinstance(part, nn.Conv1d | nn.GroupNorm)][-1]
        scale_output(module, last, config.num_quantizers, config.codebook_size, seed)
    return module if dtype is None else module.to(dtype)


def _let_codes_be_heard(module: nn.Module) -> None:
    """Draw the codebooks, which transformers leaves zero or small, and drop the biases, which would make most of the output."""
    part: Any
    for part in module.modules():
        if isinstance(part, nn.Conv1d | nn.ConvTranspose1d) and part.bias is not None:
            part.bias.zero_()
        if isinstance(part, nn.Embedding):
            part.weight.normal_()
        for name in ("embed", "embed_sum"):
            if name in part._buffers:
                getattr(part, name).normal_()
        if hasattr(part, "_embed"):  # Mimi's, else made at the first call, and left behind by `to`
            del part._embed
            part._embed = nn.Buffer(part.embed_sum.clone(), persistent=False)


def _fix_padding(module: nn.Module) -> None:
    """Keep the padding of convolutions in numbers: transformers keeps it in tensors, and reading one synchronises."""
    part: Any
    for part in module.modules():
        if hasattr(part, "_get_extra_padding_for_conv1d"):
            part._get_extra_padding_for_conv1d = _no_extra_padding
            for name in list(part._buffers):
                value = int(getattr(part, name))
                delattr(part, name)
                setattr(part, name, value)


def _no_extra_padding(hidden_states: Tensor) -> int:
    return 0  # it completes the last step of a stride, and in a decoder these convolutions have a stride of 1
