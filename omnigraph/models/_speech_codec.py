"""A small speech codec of our own, trained on synthetic voices: `encode(audio) -> codes`, and a decoder module."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omnigraph._files import FileError, read_json, write_json
from omnigraph._needs import need
from omnigraph.models._speech_decoder import Residual, Snake, SpeechConfig, SpeechDecoder, Transformer
from omnigraph.models._weights import fresh, scale_output

SCHEMA = "omnigraph.speech_codec/1"
WEIGHTS, ABOUT = "codec.safetensors", "codec.json"


class SpeechEncoder(nn.Module):
    """Audio `[B, 1, n * upsample]` to latents `[B, codebook_dim, n]`. Its convolutions look ahead, as a recording allows."""

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        c = config
        widths = [*reversed(c.channels), c.hidden]
        stages: list[nn.Module] = [nn.Conv1d(1, widths[0], 7, padding=3)]
        for before, after, rate in zip(widths, widths[1:], reversed(c.rates), strict=False):
            stages += [Residual(before, nn.Conv1d(before, before, 7, padding=3 * d, dilation=d)) for d in c.dilations[:2]]
            stages += [Snake(before), nn.ConstantPad1d((rate // 2, rate - rate // 2), 0.0), nn.Conv1d(before, after, 2 * rate, rate)]
        self.downsample = nn.Sequential(*stages)
        self.transformer = Transformer(c.hidden, c.heads, c.encoder_layers, c.window)
        self.output = nn.Conv1d(c.hidden, c.codebook_dim, 1)

    def forward(self, audio: Tensor) -> Tensor:
        x = self.downsample(audio)
        latents: Tensor = self.output(x + self.transformer(x))
        return latents


class SpeechCodec(nn.Module):
    """A residual-vector-quantised codec; `decoder` is the module to capture.

    Attributes:
        config: sizes; `config.sample_rate` in Hz, `config.frame_rate` frames a second, `config.upsample` samples a frame.
        about: what its file says of it: measured quality, provenance; empty for random weights.
    """

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.config = config
        self.about: dict[str, Any] = {}
        self.encoder = SpeechEncoder(config)
        self.decoder = SpeechDecoder(config)

    def latents(self, audio: Tensor) -> Tensor:
        """Audio `[B, 1, samples]` to latents `[B, codebook_dim, n]`; frame k has the samples that frame k of the decoder gives."""
        c = self.config
        frames = -(-(audio.shape[-1] + c.trim) // c.upsample)
        latents: Tensor = self.encoder(F.pad(audio, (c.trim, frames * c.upsample - c.trim - audio.shape[-1])))
        return latents

    @torch.no_grad()
    def encode(self, audio: Tensor) -> Tensor:
        """Codes `[B, num_quantizers, frames]` of audio at `config.sample_rate`; their decoded audio is as long, or up to a frame longer.

        Arguments:
            audio: `[samples]` or `[B, 1, samples]`, floating point from -1 to 1.

        Raises:
            ValueError: another shape or dtype, or no samples.
        """
        batch = audio[None, None] if audio.dim() == 1 else audio
        if batch.dim() != 3 or batch.shape[1] != 1 or not batch.numel() or not batch.is_floating_point():
            raise ValueError(f"audio is floating point, [samples] or [batch, 1, samples], not empty; got {audio.dtype} {list(audio.shape)}")
        books = self.decoder.codebooks
        residual = self.latents(batch.to(books)).mT  # [B, n, codebook_dim]
        codes = []
        for book in books:
            codes.append(nearest(residual, book))
            residual = residual - book[codes[-1]]
        return torch.stack(codes, 1)


def nearest(x: Tensor, book: Tensor) -> Tensor:
    """The index in `book` `[size, d]` of the vector nearest to each of `x` `[..., d]`."""
    return (book.square().sum(-1) - 2 * x @ book.mT).argmin(-1)


def speech_codec(
    path: str | os.PathLike[str] | None = None,
    *,
    untrained: bool = False,
    config: SpeechConfig | Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> SpeechCodec:
    """Load the project's trained speech codec: 16 kHz, 50 frames a second, 8 codebooks of 1,024, of synthetic English voices.

    Its `decoder` takes codes `[batch, 8, frames]` to audio `[batch, 1, frames * 320 - 50]`; `encode(audio)` makes such codes.

    Arguments:
        path: the folder of its weights; `data/models/speech_codec/` beside the package or above the working directory unless given.
        untrained: random weights instead, by `seed` and of the sizes in `config`, scaled to an output RMS of 0.15.
        dtype, device: of the weights, float32 on torch's default device unless given.

    Raises:
        FileNotFoundError: no weights there.
        FileError: weights that are not those that their JSON describes.
        ModuleNotFoundError: safetensors is missing.
    """
    on = torch.get_default_device() if device is None else torch.device(device)
    if untrained:
        codec = _random(config if isinstance(config, SpeechConfig) else SpeechConfig.read(config or {}), seed, on)
    elif config is not None:
        raise ValueError("config= is for untrained=True: trained weights have their own")
    else:
        codec = _load(_find() if path is None else Path(path), on)
    return codec if dtype is None else codec.to(dtype)


def save_speech_codec(codec: SpeechCodec, path: str | os.PathLike[str], about: Mapping[str, Any]) -> Path:
    """Write the weights as float16 into the folder `path`, and beside them a JSON with their SHA-256, the config and `about`."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    content = need("safetensors.torch").save({name: value.half().contiguous() for name, value in codec.state_dict().items()})
    (folder / WEIGHTS).write_bytes(content)
    said = {"sha256": hashlib.sha256(content).hexdigest(), "config": asdict(codec.config), **about}
    return write_json(folder / ABOUT, SCHEMA, said)


def _find() -> Path:
    places = [Path.cwd(), *Path.cwd().parents[:2], Path(__file__).parents[2]]
    folders = [place / "data" / "models" / "speech_codec" for place in places]
    for folder in folders:
        if (folder / ABOUT).exists():
            return folder
    return folders[-1]


def _load(folder: Path, device: torch.device) -> SpeechCodec:
    for name in (ABOUT, WEIGHTS):
        if not (folder / name).exists():
            raise FileNotFoundError(
                f"the speech codec's weights are not here: {folder / name} is missing. They come with a checkout of the project, not with "
                f"an installed package: give path=, the folder that has them, or untrained=True for random weights"
            )
    about = read_json(folder / ABOUT, SCHEMA)
    content = (folder / WEIGHTS).read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != about.get("sha256"):
        raise FileError(f"{folder / WEIGHTS}: expected the SHA-256 {about.get('sha256')}, found {found}: damaged, or of another version")
    try:
        with fresh(0, device):
            codec = SpeechCodec(SpeechConfig.read(about["config"]))
            codec.load_state_dict(need("safetensors.torch").load(content))
    except (KeyError, TypeError, RuntimeError) as error:
        raise FileError(f"{folder}: weights and config do not fit each other: {error}") from error
    codec.about = {key: value for key, value in about.items() if key not in ("schema", "config")}
    return codec.requires_grad_(False).eval()


def _random(config: SpeechConfig, seed: int, device: torch.device) -> SpeechCodec:
    with fresh(seed, device):
        codec = SpeechCodec(config).requires_grad_(False).eval()
        for part in codec.modules():
            if isinstance(part, nn.Conv1d | nn.ConvTranspose1d):
                taps = part.kernel_size[0] / (part.stride[0] if isinstance(part, nn.ConvTranspose1d) else 1)
                part.weight.normal_(std=1 / math.sqrt(part.in_channels * taps))
                if part.bias is not None:
                    part.bias.zero_()
        for part in codec.modules():
            if isinstance(part, Residual):
                part.out.weight.mul_(0.3)  # so that many of them in a row do not make it louder and louder
        scale_output(codec.decoder, codec.decoder.output, config.num_quantizers, config.codebook_size, seed)
    return codec
