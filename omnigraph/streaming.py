"""Streams: codes come a few at a time, and each push gives the audio that has become final."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from omnigraph._joining import ChunkDecoder, Window, chunking, decode_windows


class StreamSession:
    """One stream of codes; what all pushes and the flush give, joined, is what `chunked_decode` gives for all codes at once.

    It keeps the frames that later calls need and no more. Streams are independent of each other, but a stream's own calls come one
    after the other.

    Args:
        chunk_size, left_context_size, ramp: in frames, as for `Chunking`.

    Raises:
        ValueError: a size is out of range, the context is too short, or the decoder cannot be decoded by chunks.
    """

    def __init__(self, decoder: ChunkDecoder, *, chunk_size: int = 25, left_context_size: int = 25, ramp: Sequence[int] = ()) -> None:
        self.decoder = decoder
        self.chunking = chunking(decoder.facts, chunk_size, left_context_size, ramp)
        if left_context_size < self.chunking.context_needed:
            raise self.chunking.too_short(self.chunking.context_needed)
        self.reset()

    def reset(self) -> None:
        """Forget all codes and begin anew."""
        self.frames = 0  # pushed so far
        self.samples = 0  # given so far
        self.finished = False
        self._start = 0  # the first frame of the next chunk
        nothing = (1, self.decoder.facts.num_quantizers, 0)
        self._held = torch.empty(nothing, dtype=torch.int64, device=self.decoder.device)  # the latest frames

    def push(self, codes: Tensor) -> Tensor:
        """Take codes `[1, Q, n]`, n of 0 or more; returns the audio `[1, C, samples]` that has become final, often none.

        Raises:
            RuntimeError: the stream was flushed and not reset.
            ValueError, TypeError: the codes are not of that form. Whatever is raised, the stream is as it was before the push.
        """
        return push_many(self.decoder, [(self, codes)])[0]

    def flush(self) -> Tensor:
        """End the stream: the rest of the audio `[1, C, samples]`; none if it was flushed before."""
        audio = _advance(self.decoder, [(self, self._held[..., :0])], ended=True)[0]
        self.finished = True
        return audio

    def __repr__(self) -> str:
        return f"<StreamSession: {self.frames} frames in, {self.samples} samples out{', finished' if self.finished else ''}>"


def push_many(decoder: ChunkDecoder, pushes: Sequence[tuple[StreamSession, Tensor]]) -> list[Tensor]:
    """Push codes `[1, Q, n]` to many streams of one decoder; what is due in all of them is decoded in packed calls.

    Returns:
        what `push` would have returned, one for each.

    Raises:
        RuntimeError: a stream was flushed and not reset.
        ValueError, TypeError: codes of another form, a stream twice or of another decoder. Whatever is raised, all streams are as before.
    """
    for session, codes in pushes:
        if session.decoder is not decoder:
            raise ValueError(f"{session} belongs to another decoder: push to it there")
        if session.finished:
            raise RuntimeError("this stream was flushed: call reset() before new codes")
        decoder.check(codes, empty=True)
        if len(codes) != 1:
            raise ValueError(f"a stream takes codes [1, quantizers, frames]; got {tuple(codes.shape)}")
    if len({id(session) for session, _ in pushes}) < len(pushes):
        raise ValueError("a stream is listed twice: join its codes into one push")
    return _advance(decoder, pushes, ended=False)


def _advance(decoder: ChunkDecoder, pushes: Sequence[tuple[StreamSession, Tensor]], *, ended: bool) -> list[Tensor]:
    """Decode what is due in all streams, then, when nothing can fail any more, move them on."""
    windows, sizes, moved = [], [], []
    for to, (session, codes) in enumerate(pushes):
        held = torch.cat([session._held, codes], -1)
        frames = session.frames + codes.shape[-1]
        first = frames - held.shape[-1]  # the frame that held[..., 0] is
        chunks, start = session.chunking.due(session._start, frames, ended=ended)
        for chunk in chunks:
            here = replace(chunk, first=chunk.first - first, last=chunk.last - first, at=chunk.at - session.samples)
            windows.append(Window(held[0], here, to))
        sizes.append(sum(chunk.keep for chunk in chunks))
        spent = max(start - session.chunking.left_context_size, 0) - first
        moved.append((frames, start, held[..., spent:].clone() if spent else held))
    audios = decode_windows(decoder, windows, sizes)
    for (session, _), size, (frames, start, held) in zip(pushes, sizes, moved, strict=True):
        session.frames, session.samples, session._start, session._held = frames, session.samples + size, start, held
    return [audio[None] for audio in audios]
