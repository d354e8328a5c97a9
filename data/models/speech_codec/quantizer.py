"""Codebooks that follow what they quantise: running means, as in VQ-VAE (van den Oord et al., 2017) and SoundStream (2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from omnigraph.models._speech_codec import nearest

KEEP = 0.99  # of the running means, each step
DEAD = 0.1  # used less than this part of the average use: a code takes the place of a random vector


class Quantizer:
    """Residual vector quantisation; `books` `[Q, size, d]` are the decoder's own, changed in place."""

    def __init__(self, books: Tensor) -> None:
        self.books = books.detach()
        self.sizes = torch.ones_like(self.books[..., 0])
        self.sums = self.books.clone()

    def __call__(self, latents: Tensor, random: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Latents `[B, d, n]` quantised, gradients passed through, and the commitment loss. With `random` the books learn."""
        residual = latents.float().mT.flatten(0, 1)  # [B * n, d]
        total, losses = torch.zeros_like(residual), []
        for i in range(len(self.books)):
            chosen = nearest(residual.detach(), self.books[i])
            found = self.books[i][chosen]  # a copy: the book may change below
            losses.append((residual - found).square().mean())
            if random is not None:
                self._learn(i, residual.detach(), chosen, random)
            residual = residual - found
            total = total + found
        quantised = total.unflatten(0, (len(latents), -1)).mT
        return latents + (quantised - latents).detach(), torch.stack(losses).mean()

    @torch.no_grad()
    def _learn(self, i: int, x: Tensor, chosen: Tensor, random: torch.Generator) -> None:
        sizes, sums, average = self.sizes[i], self.sums[i], len(x) / len(self.sizes[i])
        sizes.lerp_(torch.zeros_like(sizes).index_add_(0, chosen, torch.ones_like(x[:, 0])), 1 - KEEP)
        sums.lerp_(torch.zeros_like(sums).index_add_(0, chosen, x), 1 - KEEP)
        dead = sizes < DEAD * average
        picked = x[torch.randint(len(x), dead.shape, generator=random, device=x.device)]
        sums.copy_(torch.where(dead[:, None], picked * average, sums))
        sizes.masked_fill_(dead, average)
        self.books[i].copy_(sums / sizes[:, None])

    @torch.no_grad()
    def start(self, x: Tensor, average: float, random: torch.Generator, rounds: int = 12) -> None:
        """Set all books by k-means on latents `[N, d]`; `average` is how often a code will be used in a step."""
        for i in range(len(self.books)):
            size = len(self.books[i])
            book = x[torch.randperm(len(x), generator=random, device=x.device)[:size]].clone()
            for _ in range(rounds):
                chosen = nearest(x, book)
                counts = torch.zeros(size, device=x.device).index_add_(0, chosen, torch.ones_like(x[:, 0]))
                sums = torch.zeros_like(book).index_add_(0, chosen, x)
                fresh = x[torch.randint(len(x), (size,), generator=random, device=x.device)]
                book = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], fresh)
            self.sizes[i].copy_((counts * (size * average / len(x))).clamp(min=DEAD * average))
            self.sums[i].copy_(book * self.sizes[i][:, None])
            self.books[i].copy_(book)
            x = x - book[nearest(x, book)]


def perplexity(codes: Tensor, size: int) -> list[int]:
    """How many codes of each book are in use in `codes` `[Q, n]`: the exponential of their entropy."""
    shares = [torch.bincount(row, minlength=size) / len(row) for row in codes]
    return [round(float(torch.exp(-(share * share.clamp(min=1e-12).log()).sum()))) for share in shares]
