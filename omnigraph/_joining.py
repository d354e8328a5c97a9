"""Decoding by chunks on top of a decoder: windows gathered into packed calls, what is kept of each put in its place."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from omnigraph._warmup import check_output
from omnigraph.chunks import Chunk, Chunking
from omnigraph.facts import DecoderFacts
from omnigraph.packing import Call


class ChunkDecoder(Protocol):
    """What chunked decoding asks of a decoder; `GraphedDecoder` is one."""

    @property
    def facts(self) -> DecoderFacts: ...

    @property
    def device(self) -> torch.device: ...

    def decode(self, codes: Tensor) -> Tensor:
        """Codes `[B, Q, F]` to audio `[B, C, samples]`, the caller's own."""
        ...

    def check(self, codes: Tensor, *, empty: bool = False, values: bool = True) -> object:
        """Raise unless `codes` can be decoded: with `empty`, no frames are fine; without `values`, codes out of range are."""
        ...

    def pack(self, lengths: Sequence[int], max_batch_size: int | None = None) -> list[Call]:
        """Group windows of so many frames into calls, as `packing.pack` does for what is captured now."""
        ...


class Window(NamedTuple):
    """A chunk of `codes` `[Q, F]`; what is kept of it goes to output `to`."""

    codes: Tensor
    chunk: Chunk
    to: int


def chunking(facts: DecoderFacts, chunk_size: int, left_context_size: int, ramp: Sequence[int] = ()) -> Chunking:
    """How to cut the codes of a decoder.

    Raises:
        ValueError: a size is out of range, or the decoder cannot be decoded by chunks.
    """
    why = "keeps state between calls" if facts.stateful else "looks ahead, and no bound was found" if facts.lookahead is None else ""
    if why:
        raise ValueError(f"this decoder cannot be decoded by chunks: it {why} ({'; '.join(facts.assumed)}). Use decode()")
    return Chunking(chunk_size, left_context_size, facts.upsample, facts.trim, tuple(ramp), facts.lookahead or 0)


@torch.no_grad()
def decode_windows(
    decoder: ChunkDecoder, windows: Sequence[Window], sizes: Sequence[int], max_batch_size: int | None = None
) -> list[Tensor]:
    """Decode windows in packed calls; returns an output `[C, samples]` for each of `sizes`, which what the windows keep must fill.

    Raises:
        ValueError: the decoder returned another batch size or other lengths than its facts say.
    """
    facts = decoder.facts
    audios: list[Tensor] = []
    for call in decoder.pack([chunk.last - chunk.first for _, chunk, _ in windows], max_batch_size):
        rows = [windows[i] for i in call.windows]
        codes = torch.stack([_padded(codes[:, chunk.first : chunk.last], call.shape.frames) for codes, chunk, _ in rows])
        audio = check_output(decoder.decode(codes), call.shape, facts)
        audios = audios or [audio.new_empty(audio.shape[1], size) for size in sizes]
        for (_, chunk, to), samples in zip(rows, audio.unbind(), strict=True):
            audios[to].narrow(1, chunk.at, chunk.keep).copy_(samples.narrow(1, chunk.skip, chunk.keep))
    return audios or [torch.empty(facts.channels, size, dtype=facts.dtype, device=decoder.device) for size in sizes]


def _padded(codes: Tensor, frames: int) -> Tensor:
    return codes if codes.shape[-1] == frames else pad(codes, (0, frames - codes.shape[-1]))


def check_lengths(lengths: Sequence[int] | Tensor, codes: Tensor) -> list[int]:
    """The lengths of requests that are rows of `codes`, as plain integers.

    Raises:
        ValueError: there are more or fewer than rows, or one is no integer, negative or beyond the codes.
    """
    batch, frames = codes.shape[0], codes.shape[-1]
    given = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    try:
        found = [operator.index(length) for length in given if not isinstance(length, bool)]
    except TypeError as error:
        raise ValueError(f"expected {batch} lengths in frames, integers; got {given!r}") from error
    if len(found) != batch or len(given) != batch or not all(0 <= length <= frames for length in found):
        raise ValueError(f"expected {batch} lengths, one for each row of the codes, from 0 to their {frames} frames; got {given!r}")
    return found


def batched_chunked(
    decoder: ChunkDecoder,
    codes: Tensor,
    lengths: Sequence[int] | Tensor,
    *,
    chunk_size: int = 300,
    left_context_size: int = 25,
    ramp: Sequence[int] = (),
    max_batch_size: int | None = None,
) -> list[Tensor]:
    """Decode requests of different lengths by chunks; all chunks of all requests are packed into as few calls as pay.

    Args:
        codes: `[B, Q, F]`, a request a row, each padded to F with anything.
        lengths: frames of each request, 0 to F.
        chunk_size, left_context_size, ramp: in frames, as for `Chunking`.
        max_batch_size: the most chunks a call decodes; None: as many as the largest bucket, at least 8.

    Returns:
        audio `[C, samples]` for each request, as long as a full decode of it.

    Raises:
        ValueError, TypeError: codes, lengths or sizes are not of that form, or the context is too short; nothing has been done then.
    """
    decoder.check(codes, empty=True, values=False)  # what lies beyond the lengths may be anything
    counts = check_lengths(lengths, codes)
    cut = chunking(decoder.facts, chunk_size, left_context_size, ramp)
    windows = [Window(codes[row], chunk, row) for row, frames in enumerate(counts) for chunk in cut.schedule(frames)]
    return decode_windows(decoder, windows, [cut.samples(frames) for frames in counts], max_batch_size)


def chunked(
    decoder: ChunkDecoder,
    codes: Tensor,
    *,
    chunk_size: int = 300,
    left_context_size: int = 25,
    ramp: Sequence[int] = (),
    max_batch_size: int | None = None,
) -> Tensor:
    """Decode codes `[B, Q, F]` by chunks: audio `[B, C, samples]`, as long as a full decode; arguments as for `batched_chunked`."""
    decoder.check(codes, empty=True)
    if len(codes) > 1 and not decoder.facts.rows_independent:
        raise ValueError(f"this decoder mixes the rows of a batch, so its chunks cannot be packed: give one row a call, not {len(codes)}")
    lengths = [codes.shape[-1]] * len(codes)
    audios = batched_chunked(
        decoder, codes, lengths, chunk_size=chunk_size, left_context_size=left_context_size, ramp=ramp, max_batch_size=max_batch_size
    )
    return torch.stack(audios) if len(audios) > 1 else audios[0][None]
