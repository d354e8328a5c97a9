"""Requests and the denoising loop of Qwen-Image-2.1, eager or by decode graphs, on random latents and text embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from omnigraph._needs import need
from omnigraph.models._qwen_adapter import QwenImageAdapter
from omnigraph.prefix import DecodeGraphCache, Prefix

Shape3 = tuple[int, int, int]  # frames, height, width of an image in latent tokens


@dataclass(frozen=True, eq=False)
class ImageRequest:
    """What one denoising run works on.

    `latents` is the noise `[batch, target tokens, channels]`, `conditions` the condition images' latents, `shapes` all images' frames,
    height and width, the target last. Each branch has its text embeddings `[batch, text tokens, width]` and may have a mask of them.
    """

    latents: Tensor
    conditions: Tensor
    shapes: tuple[Shape3, ...]
    texts: Mapping[str, Tensor]
    masks: Mapping[str, Tensor | None]

    def image_slots(self, branch: str) -> Tensor:
        """`[batch, slots]`: True where an image stands in the text model's sequence, one slot for 2 x 2 latent tokens; images come last."""
        slots = sum(prod(shape) for shape in self.shapes) // 4
        return (
            torch.arange(self.text_tokens(branch) + slots, device=self.latents.device)
            .ge(self.text_tokens(branch))
            .expand(len(self.latents), -1)
        )

    def prefix_tokens(self, branch: str) -> int:
        return self.text_tokens(branch) + self.conditions.shape[1]

    def text_tokens(self, branch: str) -> int:
        return self.texts[branch].shape[1] - self.conditions.shape[1] // 4


def image_request(
    model: nn.Module,
    target: Sequence[int],
    *,
    text_tokens: int = 32,
    negative_tokens: int | None = None,
    conditions: Sequence[Sequence[int]] = (),
    batch: int = 1,
    padded: int = 0,
    seed: int = 0,
) -> ImageRequest:
    """Random latents and text embeddings, drawn on the CPU, so that every device gets the same.

    Args:
        target: height and width of the image in latent tokens, their product a multiple of 4.
        text_tokens: of the branch "conditional"; `negative_tokens` of the branch "negative", as many unless given.
        conditions: heights and widths of condition images.
        padded: this many of the last text tokens of each row are padding.

    Raises:
        ValueError: a size is not positive, or an image has no multiple of 4 tokens.
    """
    config: Any = model.config
    first = next(model.parameters())
    shapes = tuple((1, height, width) for height, width in (*conditions, target))
    lengths = {"conditional": text_tokens, "negative": text_tokens if negative_tokens is None else negative_tokens}
    if any(prod(shape) % 4 or min(shape) < 1 for shape in shapes) or batch < 1 or not 0 <= padded < min(lengths.values()):
        raise ValueError(
            f"images need a positive multiple of 4 tokens, texts and batches at least 1, more of them than padding; got "
            f"{target=}, {conditions=}, {text_tokens=}, {negative_tokens=}, {batch=}, {padded=}"
        )
    random = torch.Generator("cpu").manual_seed(seed)

    def draw(tokens: int, channels: int) -> Tensor:
        return torch.randn(batch, tokens, channels, generator=random, device="cpu").to(first.device, first.dtype)

    tokens = [prod(shape) for shape in shapes]
    slots = sum(tokens[:-1]) // 4
    masks: dict[str, Tensor | None] = dict.fromkeys(lengths)
    if padded:
        for branch, length in lengths.items():
            masks[branch] = (torch.arange(length + slots, device=first.device) < length - padded).expand(batch, -1)
    return ImageRequest(
        draw(tokens[-1], config.in_channels),
        draw(sum(tokens[:-1]), config.in_channels),
        shapes,
        {branch: draw(length + slots, config.context_in_dim) for branch, length in lengths.items()},
        masks,
    )


def _forward(model: nn.Module, request: ImageRequest, branch: str, latents: Tensor, timestep: Tensor, cache: object, mode: str) -> Tensor:
    """The model's own call; the velocity of the target tokens."""
    output: Tensor = model(
        hidden_states=torch.cat([request.conditions, latents], dim=1),
        encoder_hidden_states=request.texts[branch],
        timestep=timestep,
        img_shapes=[list(request.shapes)] * len(latents),
        img_mask=request.image_slots(branch),
        encoder_hidden_states_mask=request.masks[branch],
        kv_cache=cache,
        kv_cache_mode=mode,
        return_dict=False,
    )[0]
    return output[:, -latents.shape[1] :]


def _cache(layers: Sequence[tuple[Tensor, Tensor] | None]) -> Any:
    cache = need("diffusers.models.transformers.transformer_qwenimage21").QwenImage21KVCache(len(layers))
    for n, pair in enumerate(layers):
        if pair is not None:
            cache.get_layer(n).store(*pair)
    return cache


@torch.no_grad()
def prefill(model: nn.Module, request: ImageRequest, branch: str, latents: Tensor, timestep: Tensor) -> tuple[Tensor, Prefix]:
    """The first step: the model on the whole sequence. Returns the velocity of the target tokens, and the prefix for later steps.

    Args:
        latents: `[batch, target tokens, channels]`.
        timestep: `[batch]`, 1 for noise to 0 for the image.
    """
    parts: Any = model
    cache = _cache([None] * len(parts.transformer_blocks))
    velocity = _forward(model, request, branch, latents, timestep, cache, "extract")
    slots = request.image_slots(branch)[0]
    where = slots.repeat_interleave(torch.where(slots, 4, 1))
    freqs = parts.pos_embed(list(request.shapes), where, device=latents.device)[-latents.shape[1] :]
    layers = tuple((layer.k, layer.v) for layer in cache.layer_caches)
    mask = request.masks[branch]
    return velocity, Prefix(
        branch, layers, request.shapes, (freqs,), text_mask=None if mask is None else mask[:, : request.text_tokens(branch)]
    )


@torch.no_grad()
def decode(model: nn.Module, request: ImageRequest, prefix: Prefix, latents: Tensor, timestep: Tensor) -> Tensor:
    """A later step, eagerly: the model's own cached call. Returns the velocity of the target tokens."""
    return _forward(model, request, prefix.branch, latents, timestep, _cache(prefix.layers), "cached")


def denoising(
    model: nn.Module,
    request: ImageRequest,
    *,
    steps: int = 8,
    guidance: float | None = None,
    graphs: bool | DecodeGraphCache = True,
) -> Iterator[Tensor]:
    """Yield the latents after each step of flow matching (Euler steps from noise at time 1 to the image at time 0).

    The first step is the prefill, the later ones decode from its prefix. Run several of them in turn, on one cache, to interleave
    requests.

    Args:
        guidance: classifier-free, the velocity `negative + guidance * (conditional - negative)`; None runs one branch alone.
        graphs: a cache to decode with, True for one of its own, False for eager steps.

    Raises:
        ValueError: `steps` is not positive.
    """
    if steps < 1:
        raise ValueError(f"steps is positive; got {steps}")
    cache = DecodeGraphCache(QwenImageAdapter(model)) if graphs is True else graphs or None
    latents, prefixes = request.latents, dict[str, Prefix]()
    try:
        for n in range(steps):
            now, then = 1 - n / steps, 1 - (n + 1) / steps
            timestep = torch.full((len(latents),), now, device=latents.device)
            velocities = []
            for branch in ("conditional",) if guidance is None else ("conditional", "negative"):
                velocity = None
                if n == 0:
                    velocity, prefixes[branch] = prefill(model, request, branch, latents, timestep)
                    if cache is not None:
                        cache.register_prefill(prefixes[branch])
                elif cache is not None:
                    velocity = cache.try_decode(prefixes[branch], latents, timestep)
                velocities.append(decode(model, request, prefixes[branch], latents, timestep) if velocity is None else velocity)
            velocity = velocities[0] if guidance is None else velocities[1] + guidance * (velocities[0] - velocities[1])
            latents = latents + (then - now) * velocity
            yield latents
    finally:
        if graphs is True and cache is not None:
            cache.clear()


def denoise(
    model: nn.Module,
    request: ImageRequest,
    *,
    steps: int = 8,
    guidance: float | None = None,
    graphs: bool | DecodeGraphCache = True,
) -> Tensor:
    """The image's latents `[batch, target tokens, channels]` after all steps; see `denoising`."""
    *_, latents = denoising(model, request, steps=steps, guidance=guidance, graphs=graphs)
    return latents
