"""What the codec is trained by: spectra at several scales, and critics that tell its spectra from real ones."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu
from torch.nn.utils.parametrizations import weight_norm

RATE = 16_000
FLOOR = 1e-4  # of an amplitude: -80 dB
SCALES = {64: 6, 128: 10, 256: 20, 512: 40, 1024: 80, 2048: 120}  # window: mel bands


@cache
def window(size: int, device: torch.device) -> Tensor:
    return torch.hann_window(size, device=device)


@cache
def mel_bands(size: int, bands: int, device: torch.device) -> Tensor:
    """Triangles of unit sum `[size // 2 + 1, bands]`, even on the mel scale 2595 log10(1 + f / 700)."""
    edges = 700 * (10 ** (torch.linspace(0, 2595 * math.log10(1 + RATE / 2 / 700), bands + 2) / 2595) - 1)
    at = torch.linspace(0, RATE / 2, size // 2 + 1)[:, None]
    rise, fall = (at - edges[:-2]) / (edges[1:-1] - edges[:-2]), (edges[2:] - at) / (edges[2:] - edges[1:-1])
    triangles = torch.minimum(rise, fall).clamp(min=0)
    # A band narrower than the bins takes the bin that is nearest.
    empty = triangles.sum(0) == 0
    triangles[(edges[1:-1] / RATE * size).round().long()[empty], empty.nonzero()[:, 0]] = 1
    return (triangles / triangles.sum(0)).to(device)


def spectrum(audio: Tensor, size: int) -> Tensor:
    """Complex amplitudes `[B, bins, frames]` of `[B, samples]`, in float32; a sine of amplitude 1 gives 0.5."""
    hann = window(size, audio.device)
    return torch.stft(audio.float(), size, size // 4, window=hann, return_complex=True) / hann.sum()


def magnitude(audio: Tensor, size: int) -> Tensor:
    parts = torch.view_as_real(spectrum(audio, size))
    return (parts.square().sum(-1) + 1e-12).sqrt()  # abs() has no gradient at 0


def spectral_loss(fake: Tensor, real: Tensor) -> Tensor:
    """Mean over scales of the L1 distance of log mel spectra, and of that of magnitudes over their mean."""
    losses = []
    for size, bands in SCALES.items():
        a, b = magnitude(fake, size), magnitude(real, size)
        mel = mel_bands(size, bands, a.device)
        log_a, log_b = ((x.mT @ mel).clamp(min=FLOOR).log() for x in (a, b))
        losses += [(log_a - log_b).abs().mean(), (a - b).abs().mean() / b.mean()]
    return torch.stack(losses).sum() / len(SCALES)


@torch.no_grad()
def mel_distance(fake: Tensor, real: Tensor) -> float:
    """Mean absolute difference in dB of 80 mel bands (64 ms, steps of 16 ms), levels below -80 dB counted as -80 dB."""
    mel = mel_bands(1024, 80, fake.device)
    a, b = ((magnitude(x, 1024).mT @ mel).clamp(min=FLOOR).log10() for x in (fake, real))
    return 20 * float((a - b).abs().mean())


class Critic(nn.Module):
    """2-D convolutions over one complex spectrum, as in EnCodec (Défossez et al., 2022): all features, the verdict last."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.size = size
        self.layers = nn.ModuleList(
            [
                weight_norm(nn.Conv2d(2, width, (3, 9), padding=(1, 4))),
                *(weight_norm(nn.Conv2d(width, width, (3, 9), stride=(1, 2), dilation=(d, 1), padding=(d, 4))) for d in (1, 2, 4)),
                weight_norm(nn.Conv2d(width, width, 3, padding=1)),
                weight_norm(nn.Conv2d(width, 1, 3, padding=1)),
            ]
        )

    def forward(self, audio: Tensor) -> list[Tensor]:
        x = torch.view_as_real(spectrum(audio, self.size)).permute(0, 3, 2, 1)  # [B, 2, frames, bins]
        x = x * self.size**0.5  # so that noise has the same size whatever the window
        x = x * (x.square().sum(1, keepdim=True) + 1e-5) ** -0.35  # magnitudes to the power of 0.3: critics learn several times as fast
        features = []
        for i, layer in enumerate(self.layers):
            x = layer(x if i == 0 else leaky_relu(x, 0.2))
            features.append(x)
        return features


class Critics(nn.Module):
    """Critics of several window sizes: the features of each."""

    def __init__(self, sizes: tuple[int, ...] = (256, 512, 1024), width: int = 32) -> None:
        super().__init__()
        self.critics = nn.ModuleList(Critic(size, width) for size in sizes)

    def forward(self, audio: Tensor) -> list[list[Tensor]]:
        return [critic(audio) for critic in self.critics]


def critic_losses(features: list[list[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Three losses from the features of a batch whose first half is fake and whose second is real.

    Returns:
        the hinge loss of the codec, the distance of its features from those of real speech over their mean, the critics' hinge loss.
    """
    adversarial, matching, critic = [], [], []
    for found in features:
        fake, real = found[-1].float().chunk(2)
        adversarial.append((1 - fake).relu().mean())
        critic.append((1 + fake).relu().mean() + (1 - real).relu().mean())
        for layer in found[:-1]:
            a, b = layer.float().chunk(2)
            matching.append((a - b.detach()).abs().mean() / b.detach().abs().mean())
    return torch.stack(adversarial).mean(), torch.stack(matching).mean(), torch.stack(critic).mean()
