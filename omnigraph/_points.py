"""Measured points of a profile, and the surface through them: what a shape that was not measured would have taken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnigraph._needs import need
from omnigraph.shapes import How, Shape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Point:
    """One shape, run one way.

    `ms` is the median of `repeats` runs and `spread` their interquartile range, both in milliseconds. Of a graph,
    `bytes_alone` is what it takes in a pool of its own, `bytes_marginal` what it adds to a pool that holds larger ones, and
    `seconds` what its warm-up takes: first run, compilation, capture.
    """

    shape: Shape
    how: How
    ms: float
    spread: float = 0.0
    repeats: int = 1
    bytes_alone: int = 0
    bytes_marginal: int = 0
    seconds: float = 0.0


class Surface:
    """Values at shapes, and between them: piecewise linear in frames, then linear between the two neighbouring batch sizes.

    Beyond the measured it is extrapolated, and `at` says so: past the last length of a batch size by the slope of its last two
    points; past the largest batch size as that one at as many frames in all; below the smallest as the smallest. The measured
    shapes need not be a full grid.
    """

    def __init__(self, values: Mapping[Shape, float]) -> None:
        np = need("numpy")
        rows: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for (batch, frames), value in sorted(values.items()):
            rows[batch].append((frames, value))
        self._batches = np.array(list(rows), dtype=float)
        self._rows: list[tuple[Floats, Floats]] = [tuple(np.array(row, dtype=float).T) for row in rows.values()]

    def at(self, batch: Floats, frames: Floats) -> tuple[Floats, Bools]:
        """The values at `len(batch)` shapes, and which of them are extrapolated.

        >>> import numpy as np
        >>> surface = Surface({Shape(1, 10): 2.0, Shape(1, 20): 4.0, Shape(3, 10): 6.0, Shape(3, 20): 10.0})
        >>> values, outside = surface.at(np.array([1.0, 2.0, 1.0]), np.array([15.0, 10.0, 30.0]))
        >>> values.tolist(), outside.tolist()
        ([3.0, 4.0, 6.0], [False, False, True])
        """
        np = need("numpy")
        batches, last = self._batches, len(self._batches) - 1
        low = np.clip(np.searchsorted(batches, batch, side="right") - 1, 0, last)
        high = np.clip(np.searchsorted(batches, batch, side="left"), 0, last)
        gap = np.where(high > low, batches[high] - batches[low], 1.0)
        share = np.where(high > low, (batch - batches[low]) / gap, 0.0)
        longer = frames * np.maximum(batch / batches[-1], 1.0)
        values, outside = np.zeros(len(batch)), (batch < batches[0]) | (batch > batches[-1])
        for row, (lengths, measured) in enumerate(self._rows):
            for rows, weight in ((low, 1.0 - share), (high, share)):
                here = (rows == row) & (weight > 0)
                if here.any():
                    values[here] += weight[here] * _along(lengths, measured, longer[here])
                    outside[here] |= (longer[here] < lengths[0]) | (longer[here] > lengths[-1])
        return values, outside


def _along(lengths: Floats, measured: Floats, frames: Floats) -> Floats:
    """Piecewise linear through one batch size's points, level before them, straight on after them."""
    np = need("numpy")
    slope = measured[-1] / lengths[-1]
    if len(lengths) > 1:
        slope = max((measured[-1] - measured[-2]) / (lengths[-1] - lengths[-2]), 0.0)
    values: Floats = np.interp(frames, lengths, measured) + np.maximum(frames - lengths[-1], 0.0) * slope
    return values
