"""The chunk schedule: which frames each decoder call sees, and which samples of its output are kept, so that no seam is left.

A call on `n` frames gives `n * upsample - trim` samples, and frame `k` is the first to matter to sample `k * upsample - trim`
(with lookahead: `(k - lookahead) * upsample - trim`). So the audio of the frames before `k` ends at that sample, wherever the
call began: chunk after chunk is kept from the one bound to the next, and the bounds tile the output. A call that begins at frame
`first` begins at sample `first * upsample`; the context must reach back far enough for that to be no later than the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """One decoder call on the frames `first:last`; samples `skip:skip + keep` of its output are samples `at:at + keep` of the whole."""

    first: int
    last: int
    skip: int
    keep: int
    at: int


@dataclass(frozen=True, slots=True)
class Chunking:
    """How codes are cut, offline and in a stream alike.

    Args:
        chunk_size: new frames a chunk.
        left_context_size: frames before them that are decoded again.
        upsample, trim: a call on n frames gives `n * upsample - trim` samples.
        ramp: sizes in frames of the first chunks, before `chunk_size`.
        lookahead: frames after the chunk that its call sees too, because they matter to its last samples.

    Raises:
        ValueError: a size is out of range.
    """

    chunk_size: int
    left_context_size: int
    upsample: int
    trim: int = 0
    ramp: tuple[int, ...] = ()
    lookahead: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ramp", tuple(self.ramp))
        whole = all(
            isinstance(n, int) and not isinstance(n, bool)
            for n in (self.chunk_size, self.left_context_size, self.upsample, self.trim, self.lookahead, *self.ramp)
        )
        if not whole or min(self.chunk_size, self.upsample, *self.ramp) < 1 or min(self.left_context_size, self.lookahead) < 0:
            raise ValueError(
                "chunk_size, upsample and every size of the ramp are at least 1, left_context_size and lookahead at least 0, "
                f"all integers; got {self}"
            )

    @property
    def context_needed(self) -> int:
        """The shortest left context in frames that loses no sample, however long the codes are."""
        return max(-(-self.trim // self.upsample), 0)

    def samples(self, frames: int) -> int:
        """The length of a full decode of so many frames."""
        return max(frames * self.upsample - self.trim, 0) if frames else 0

    def end(self, start: int) -> int:
        """The frame after the chunk that begins at `start`.

        >>> cut = Chunking(25, 25, 1, ramp=(4, 8))
        >>> [cut.end(start) for start in (0, 4, 12, 37)]
        [4, 12, 37, 62]
        """
        end = 0
        for size in self.ramp:
            end += size
            if end > start:
                return end
        return start + self.chunk_size

    def due(self, start: int, frames: int, *, ended: bool) -> tuple[list[Chunk], int]:
        """The chunks from frame `start` on that can be decoded once `frames` frames have come, and where the next one starts.

        `ended`: no more will come, so what is left makes the last chunk. A chunk that would keep nothing needs no call and is left out.
        """
        chunks = []
        while start < frames:
            end = self.end(start)
            last = end + self.lookahead
            if last > frames:
                if not ended:
                    break
                end = last = frames
            first = max(start - self.left_context_size, 0)
            at, until = self.samples(start), self.samples(end)
            if until > at:
                chunks.append(Chunk(first, last, at - first * self.upsample, until - at, at))
            start = end
        return chunks, start

    def schedule(self, frames: int) -> list[Chunk]:
        """The calls that decode `frames` frames, in order.

        Raises:
            ValueError: `frames` is negative, or the context is too short to make up for `trim`.
        """
        if frames < 0:
            raise ValueError(f"cannot cut {frames} frames: give 0 or more")
        chunks, _ = self.due(0, frames, ended=True)
        if any(chunk.skip < 0 for chunk in chunks):
            reaches_zero = chunks[-1].first + self.left_context_size  # the last start: with that much context all calls begin at frame 0
            raise self.too_short(min(self.context_needed, reaches_zero))
        return chunks

    def too_short(self, needed: int) -> ValueError:
        return ValueError(
            f"left_context_size={self.left_context_size} loses samples at the seams: "
            f"a trim of {self.trim} samples at {self.upsample} a frame needs at least {needed} frames here"
        )


def schedule(
    frames: int,
    *,
    chunk_size: int,
    left_context_size: int,
    upsample: int,
    trim: int = 0,
    ramp: Sequence[int] = (),
    lookahead: int = 0,
) -> list[Chunk]:
    """The calls that decode `frames` frames, in order; the arguments are those of `Chunking`.

    >>> [(c.first, c.last, c.skip, c.keep, c.at) for c in schedule(5, chunk_size=2, left_context_size=1, upsample=10, trim=3)]
    [(0, 2, 0, 17, 0), (1, 4, 7, 20, 17), (3, 5, 7, 10, 37)]

    Raises:
        ValueError: a size is out of range, or the context is too short to make up for `trim`.
    """
    return Chunking(chunk_size, left_context_size, upsample, trim, tuple(ramp), lookahead).schedule(frames)
