"""What one decode graph of a diffusion request owns, and what a model's adapter does for it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import InitVar, dataclass, field
from itertools import compress
from math import prod
from operator import attrgetter, call, is_
from typing import NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from omnigraph._pool import Pool
from omnigraph.graph import CapturedGraph
from omnigraph.shapes import Bucket, Shape
from omnigraph.stats import Fallback, Outcome

ALIGNMENT = 256  # bytes: what the CUDA allocator gives, and more than any kernel asks for
_version = attrgetter("_version")


@dataclass(frozen=True, eq=False)
class Prefix:
    """The part of a diffusion request that no denoising step changes: its keys and values, made at prefill. The request owns it.

    Args:
        branch: "conditional", "negative" or any name: branches of one request are told apart by it.
        layers: K and V of each layer, `[batch, prefix tokens, ...]`; empty where the prefill left none.
        layout: everything that decides where tokens stand, hashable: for images `((frames, height, width), ...)`, the target last.
        freqs: what else a step reads and no step changes, such as the target's rotary frequencies.
        scales: of a quantized prefix, which no graph serves.
        padded: the text has padding, which keeps the request eager.
        text_mask: `[batch, text tokens]`, True where valid: read here, once, for `padded`.

    Tensors made in inference mode have no version counter: they must not be written to. In other ones a write is noticed.

    Raises:
        ValueError: keys and values differ in batch, length, dtype or device.
    """

    branch: str
    layers: tuple[tuple[Tensor, Tensor], ...]
    layout: tuple[Hashable, ...]
    freqs: tuple[Tensor, ...] = ()
    scales: tuple[Tensor, ...] = ()
    padded: bool = False
    text_mask: InitVar[Tensor | None] = None
    tensors: tuple[Tensor, ...] = field(init=False, repr=False)
    _key: DecodeGraphKey | None = field(init=False, repr=False, default=None)  # the last one asked for

    def __post_init__(self, text_mask: Tensor | None) -> None:
        object.__setattr__(self, "layers", tuple((k, v) for k, v in self.layers))
        object.__setattr__(self, "freqs", tuple(self.freqs))
        object.__setattr__(self, "padded", self.padded or (text_mask is not None and not bool(text_mask.all())))
        object.__setattr__(self, "tensors", (*(t for pair in self.layers for t in pair), *self.freqs))
        kinds = {(t.shape[:2], t.dtype, t.device) for pair in self.layers for t in pair}
        if len(kinds) > 1:
            raise ValueError(f"the keys and values of a prefix agree in batch, length, dtype and device; got {sorted(map(str, kinds))}")

    @property
    def device(self) -> torch.device:
        return self.layers[0][0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0][0].dtype

    def key(self, dtype: torch.dtype, attention: str) -> DecodeGraphKey:
        """The key of its decode steps on latents of this dtype."""
        known = self._key
        if known is not None and known.dtype is dtype and known.attention == attention:
            return known
        batch, tokens = self.layers[0][0].shape[:2]
        key = DecodeGraphKey(self.branch, batch, tokens, self.layout, dtype, self.device, attention)
        object.__setattr__(self, "_key", key)
        return key

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class DecodeGraphKey:
    """Which decode steps one graph can serve: those that agree in all of this."""

    branch: str
    batch: int
    prefix_tokens: int
    layout: tuple[Hashable, ...]
    dtype: torch.dtype
    device: torch.device
    attention: str
    _hash: int = field(init=False, repr=False, compare=False)  # asked for several times a step

    def __post_init__(self) -> None:
        parts = self.branch, self.batch, self.prefix_tokens, self.layout, self.dtype, self.device, self.attention
        object.__setattr__(self, "_hash", hash(parts))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return f"{self.branch} {self.batch}x{self.prefix_tokens} {self.layout} {str(self.dtype).removeprefix('torch.')} {self.attention}"


class DecodeBuffers(NamedTuple):
    """The static tensors that one graph reads. `hidden` is `[batch, target tokens, channels]`, `timestep` `[batch]`."""

    hidden: Tensor
    timestep: Tensor
    layers: tuple[tuple[Tensor, Tensor], ...]
    freqs: tuple[Tensor, ...]

    @classmethod
    def like(cls, prefix: Prefix, tokens: int, channels: int, dtype: torch.dtype) -> DecodeBuffers:
        """Buffers for decode steps on `prefix`: one allocation, outside inference mode, so that what it takes is what it holds."""
        batch, first = prefix.layers[0][0].shape[0], prefix.layers[0][0]
        wanted = [((batch, tokens, channels), dtype), ((batch,), dtype), *((tuple(t.shape), t.dtype) for t in prefix.tensors)]
        sizes = [-(-prod(shape) * kind.itemsize // ALIGNMENT) * ALIGNMENT for shape, kind in wanted]
        with torch.inference_mode(False):
            slab = torch.zeros(sum(sizes), dtype=torch.uint8, device=first.device)
            parts = [
                part[: prod(shape) * kind.itemsize].view(kind).view(shape)
                for part, (shape, kind) in zip(torch.split(slab, sizes), wanted, strict=True)
            ]
        pairs = parts[2 : 2 + 2 * len(prefix.layers)]
        return cls(parts[0], parts[1], tuple(zip(pairs[::2], pairs[1::2], strict=True)), tuple(parts[2 + len(pairs) :]))

    @property
    def nbytes(self) -> int:
        return self.hidden.untyped_storage().nbytes()


class DecodeAdapter(Protocol):
    """What `DecodeGraphCache` asks of a model. `omnigraph.models.QwenImageAdapter` is one."""

    module: nn.Module  # whose weights, structure and hooks are watched
    compiled: bool  # `step` runs compiled code

    def attention(self) -> str:
        """The attention backend in use; asked at each step, so cheap."""

    def state(self) -> object:
        """What graphs depend on and neither a weight nor the structure shows, to be compared by `==`; asked at each step, so cheap."""

    def obstacle(self) -> Fallback | None:
        """What forbids graphs now, or None. Asked when `module` or `state()` changed."""

    def buffers(self, key: DecodeGraphKey, prefix: Prefix) -> DecodeBuffers:
        """The static tensors for the steps of a key, shaped like `prefix`; see `DecodeBuffers.like`."""

    def step(self, buffers: DecodeBuffers) -> Tensor:
        """One denoising step on the target tokens alone. Runs under capture: writes to no buffer, reads no value on the host."""


class Entry:
    """One key's buffers and, once it has decoded, its graph. Whose prefix the buffers hold is known by weak references."""

    def __init__(self, buffers: DecodeBuffers, compiled: bool, pool: Pool) -> None:
        self.buffers, self.pool = buffers, pool
        self.served = Outcome("exact", (Bucket(Shape(*buffers.hidden.shape[:2]), compiled),))
        self.graph: CapturedGraph | None = None
        self.environment: tuple[object, ...] = ()
        self.seconds = 0.0  # warm-up, compilation and capture
        self.copies = self.replays = 0
        self._flat = [t for pair in buffers.layers for t in pair]
        self._owners: list[ref[Tensor]] = []
        self._prefix: ref[Prefix] | None = None  # whose copy the buffers are
        self._sources: list[ref[Tensor]] = []  # and of which tensors
        self._versioned: list[bool] = []
        self._versions: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, and what the capture added to the shared pool."""
        return self.buffers.nbytes + (self.graph.nbytes if self.graph is not None else 0)

    def owners(self) -> list[Tensor]:
        """The first K of each request that registered and is alive."""
        self._owners = [owner for owner in self._owners if owner() is not None]
        return [tensor for owner in self._owners if (tensor := owner()) is not None]

    def own(self, prefix: Prefix) -> None:
        first = prefix.layers[0][0]
        if not any(owner is first for owner in self.owners()):
            self._owners.append(ref(first))

    def forget(self, prefix: Prefix) -> None:
        """Copy `prefix` again at its next step: its prefill ran again, perhaps into the same tensors."""
        if self._sources and self._sources[0]() is prefix.tensors[0]:
            self._release()

    def _release(self) -> None:
        self._prefix, self._sources = None, []

    def holds(self, prefix: Prefix) -> bool:
        """Are the buffers a copy of `prefix` as it is now: the same tensors, not written to since?"""
        tensors = prefix.tensors
        if self._prefix is None or self._prefix() is not prefix:
            if len(tensors) != len(self._sources) or not all(map(is_, tensors, map(call, self._sources))):
                return False
            self._prefix = ref(prefix)
        return self._versions == [*map(_version, compress(tensors, self._versioned))]

    def refresh(self, prefix: Prefix) -> None:
        """Copy `prefix` into the buffers. If that breaks off, they hold nothing, and the next step copies again.

        Raises:
            ValueError: it is not shaped as the buffers are.
        """
        self._release()
        wanted, given = [*self._flat, *self.buffers.freqs], prefix.tensors
        if [(t.shape, t.dtype) for t in wanted] != [(t.shape, t.dtype) for t in given]:
            raise ValueError(
                f"{len(given)} prefix tensors, the first {tuple(given[0].shape)} {given[0].dtype}, do not fit the {len(wanted)} buffers of "
                f"the key, the first {tuple(wanted[0].shape)} {wanted[0].dtype}: they come from another model"
            )
        versioned = [not tensor.is_inference() for tensor in given]
        versions = [*map(_version, compress(given, versioned))]
        torch._foreach_copy_(self._flat, list(given[: len(self._flat)]))
        for there, now in zip(self.buffers.freqs, given[len(self._flat) :], strict=True):
            there.copy_(now)
        self.copies += 1
        self._prefix, self._sources, self._versioned, self._versions = ref(prefix), [*map(ref, given)], versioned, versions
