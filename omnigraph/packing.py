"""Packing: windows of many lengths, all decodable at once, into as few and as cheap decoder calls as the captured buckets allow."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache

from omnigraph.shapes import MAX_WASTE, Bucket, Cost, How, Route, Shape, route

# Where no cost was measured: a call costs the frames it decodes, and its launch as much as so many more. The intercepts of Code2Wav's
# times on an H200 (bfloat16, 1 x 4 to 8 x 325 frames), over 0.07 ms a frame: 2.5 ms for a replay, 11.5 ms for an eager call.
REPLAY_FRAMES = 35
EAGER_FRAMES = 165
EAGER_ROWS = 8  # rows of an eager call where neither a bucket nor `max_batch_size` allows more: those fill that GPU


@dataclass(frozen=True, slots=True)
class Call:
    """One decoder call: the windows that are its rows, longest first, and the route its shape takes."""

    route: Route
    windows: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return self.route.shape


Packer = Callable[[Sequence[int], int | None], list[Call]]


def _assumed(shape: Shape, how: How) -> float:
    return shape.batch * shape.frames + (EAGER_FRAMES if how == "eager" else REPLAY_FRAMES)


def packer(
    captured: Collection[Bucket],
    cost: Cost | None = None,
    *,
    pad_frames: bool = True,
    pad_batch: bool = True,
    split: bool = True,
    max_waste: float = MAX_WASTE,
) -> Packer:
    """A function `(lengths, max_batch_size) -> calls` that groups windows as `pack` does and remembers the prices it has looked up.

    A call of `rows` windows is as long as its longest, and costs what `route` makes of that shape, so that what is planned here is what
    the decoder will do. Sorted by length, the longest first, the groups are runs: exchanging windows between two groups to make them so
    shortens one and leaves the other as it was. What the windows from i on cost is therefore

        best[i] = min over rows of  price(rows, lengths[i]) + best[i + rows],    best[n] = 0

    `rows` being a captured batch size, `max_batch_size` or all that is left; and any number to 8 where no bucket is long enough, or
    those windows are nearly used up that need one as long as window i does (elsewhere they would put padding in a window's place).
    """
    batches = {bucket.shape.batch for bucket in captured}
    sizes = sorted({bucket.shape.frames for bucket in captured})
    large = max([EAGER_ROWS, *batches])
    price = cost or _assumed

    @cache
    def way(rows: int, frames: int) -> Route:
        return route(Shape(rows, frames), captured, cost, pad_frames=pad_frames, pad_batch=pad_batch, split=split, max_waste=max_waste)

    @cache
    def room(frames: int) -> int | None:
        """The shortest bucket length that takes such windows."""
        at = bisect_left(sizes, frames)
        return sizes[at] if at < len(sizes) and (pad_frames or sizes[at] == frames) else None

    @cache
    def paid(rows: int, frames: int) -> float:
        eager = price(Shape(rows, frames), "eager")
        if room(frames) is None:
            return eager
        if rows > large:  # to route it takes long, and splits are what the recurrence is for: only eager is in question
            least = min(paid(batch, frames) / batch for batch in batches)
            return eager if cost is not None and eager < rows * least else math.inf
        parts = way(rows, frames).parts
        return sum(price(part.bucket.shape, "compiled" if part.bucket.compiled else "plain") for part in parts) if parts else eager

    @cache
    def options(frames: int, limit: int, nearly: bool) -> list[tuple[int, float]]:
        rows = sorted({n for n in (*batches, limit) if n <= limit}, reverse=True)
        rows += [n for n in range(1, min(EAGER_ROWS, limit) + 1) if n not in rows] if nearly else []
        return [(n, paid(n, frames)) for n in rows]

    def packed(lengths: Sequence[int], max_batch_size: int | None) -> list[Call]:
        shortest = min(lengths, default=1)
        if shortest < 1 or (max_batch_size is not None and max_batch_size < 1):
            raise ValueError(f"windows and max_batch_size are at least 1; got {max_batch_size=}, the shortest window {shortest}")
        limit = (max_batch_size or large) if split else 1
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        n = end = edge = len(order)  # windows before `end` may share a call with window i, those before `edge` need a bucket as long
        best, rows_at = [math.inf] * n + [0.0], [0] * n
        frames = 0
        for i in reversed(range(n)):
            if lengths[order[i]] != frames:
                edge = i + 1 if not pad_frames or room(lengths[order[i]]) != room(frames) else edge
                end = end if pad_frames else edge
                frames = lengths[order[i]]
            left, nearly = end - i, i + EAGER_ROWS >= edge or room(frames) is None
            found = options(frames, limit, nearly)
            for rows, ms in [*found, (left, paid(left, frames))] if EAGER_ROWS < left <= limit else found:
                if rows <= left and ms + best[i + rows] < best[i] * (1 - 1e-12):
                    best[i], rows_at[i] = ms + best[i + rows], rows
        calls, i = [], 0
        while i < n:
            calls.append(Call(way(rows_at[i], lengths[order[i]]), tuple(order[i : i + rows_at[i]])))
            i += rows_at[i]
        return calls

    return packed


def pack(
    lengths: Sequence[int],
    captured: Collection[Bucket],
    cost: Cost | None = None,
    *,
    max_batch_size: int | None = None,
    pad_frames: bool = True,
    pad_batch: bool = True,
    split: bool = True,
    max_waste: float = MAX_WASTE,
) -> list[Call]:
    """Group independent windows into decoder calls so that all of them together cost least.

    Args:
        lengths: frames of each window.
        captured: the buckets that can be replayed.
        cost: milliseconds of a call; without it, the frames decoded plus a launch's worth.
        max_batch_size: the most windows a call takes, eager ones included (a bucket it is padded into may be larger). None: the largest
            captured batch, at least 8.
        pad_frames: whether windows of different lengths may share a call. If not, only equal ones do.
        pad_batch, split, max_waste: as for `route`. Without `split`, rows are not independent, and each window is a call.

    >>> [(str(call.shape), call.windows) for call in pack([25, 50, 41, 25], [Bucket(Shape(2, 50)), Bucket(Shape(2, 25))])]
    [('2x50', (1, 2)), ('2x25', (0, 3))]

    Raises:
        ValueError: a length or `max_batch_size` is below 1.
    """
    packed = packer(captured, cost, pad_frames=pad_frames, pad_batch=pad_batch, split=split, max_waste=max_waste)
    return packed(lengths, max_batch_size)
