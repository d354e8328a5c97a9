"""One decoder, one queue: the event loops behind `simulate`, and what playback makes of their times. Plain arrays, no model.

A loop takes chunks by request and place in it (`request`, `due` in seconds, `frames`) and `prices`, which gives for (batch,
frames) the number of a route and its milliseconds. It returns the call of each chunk, and start, milliseconds and route of each
call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from omnigraph._needs import need

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]
    Prices = Mapping[tuple[int, int], tuple[int, float]]

BLINK = 1e-6  # seconds: a shorter gap in the playback comes from rounding


def decode_mixed(due: Floats, frames: Ints, max_batch: int, prices: Prices) -> tuple[Ints, Floats, Floats, Ints]:
    """Decode whatever waits together, padded to the longest: ranked by due time, a batch is a run of neighbours.

    >>> import numpy as np
    >>> due, frames, prices = np.array([0.0, 0.0, 0.5]), np.array([25, 50, 50]), {(2, 50): (0, 1000.0), (1, 50): (1, 800.0)}
    >>> [array.tolist() for array in decode_mixed(due, frames, 8, prices)]
    [[0, 0, 1], [0.0, 1.0], [1000.0, 800.0], [0, 1]]
    """
    np, n = need("numpy"), len(due)
    order = np.argsort(due, kind="stable")
    times, size = due[order].tolist(), frames[order].tolist()
    starts, lengths, taken, batches = [], [], [], []
    seen, free = 0, -float("inf")
    while seen < n:
        now = max(free, times[seen])
        until = bisect_right(times, now, seen, min(seen + max_batch, n))
        index, ms = prices[until - seen, max(size[seen:until])]
        starts.append(now)
        lengths.append(ms)
        taken.append(index)
        batches.append(until - seen)
        seen, free = until, now + ms / 1e3
    call = np.empty(n, dtype=np.int64)
    call[order] = np.repeat(np.arange(len(batches)), batches)
    return call, np.array(starts), np.array(lengths), np.array(taken)


def decode_equal(request: Ints, due: Floats, frames: Ints, max_batch: int, prices: Prices) -> tuple[Ints, Floats, Floats, Ints]:
    """Decode what waits and is as long as the first of the queue: one heap of ranks for each length.

    A chunk stays out of its heap while an earlier one of its request waits in another, so none overtakes.
    """
    np, n = need("numpy"), len(due)
    order = np.argsort(due, kind="stable")  # by due time, then request, then place
    rank = np.empty(n, dtype=np.int64)
    rank[order] = np.arange(n)
    joined = np.flatnonzero(request[1:] == request[:-1])
    after_, before_ = np.full(n, n), np.full(n, -1)
    after_[rank[joined]], before_[rank[joined + 1]] = rank[joined + 1], rank[joined]
    times, size, after, before = due[order].tolist(), frames[order].tolist(), after_.tolist(), before_.tolist()

    waiting: dict[int, list[int]] = {}  # the heaps that are not empty
    queued, gone = bytearray(n), bytearray(n)
    call, starts, lengths, taken = [0] * n, list[float](), list[float](), list[int]()
    seen, free = 0, -float("inf")

    def admit(r: int) -> None:
        queued[r] = True
        heappush(waiting.setdefault(size[r], []), r)

    while waiting or seen < n:
        now = free if waiting else max(free, times[seen])
        until = bisect_right(times, now, seen)
        for r in range(seen, until):
            b = before[r]
            if b < 0 or gone[b] or (queued[b] and size[b] == size[r]):
                admit(r)
        seen = until
        length = min(waiting, key=lambda frames: waiting[frames][0])
        heap = waiting[length]
        batch = [heappop(heap) for _ in range(min(max_batch, len(heap)))]
        if not heap:
            del waiting[length]
        for r in batch:
            gone[r] = True
            call[r] = len(starts)
        for r in batch:
            a = after[r]
            while a < seen and not queued[a] and (gone[r] or size[r] == size[a]):  # what waited behind it
                admit(a)
                r, a = a, after[a]
        index, ms = prices[len(batch), length]
        starts.append(now)
        lengths.append(ms)
        taken.append(index)
        free = now + ms / 1e3
    return np.array(call)[rank], np.array(starts), np.array(lengths), np.array(taken)


def play(ahead: Floats, first: Ints, counts: Ints) -> tuple[Ints, Floats]:
    """How often and for how many seconds each request's playback stalls.

    `ahead` is when the playback would have to start for a chunk to be in time (ready minus place in the audio); a request has
    the chunks `first` to `first + counts`. It starts for the first, and each chunk that asks for a later start stalls it by the
    difference.

    >>> import numpy as np
    >>> play(np.array([1.0, 1.0, 1.5, 1.2, 1.75]), np.array([0]), np.array([5]))
    (array([2]), array([0.75]))
    """
    np = need("numpy")
    latest, stalls = ahead[first], np.zeros(len(first), dtype=np.int64)
    for k in range(1, int(counts.max())):
        long = np.flatnonzero(counts > k)
        asked = ahead[first[long] + k]
        late = asked > latest[long] + BLINK
        latest[long[late]] = asked[late]
        stalls[long[late]] += 1
    return stalls, latest - ahead[first]
