"""Shapes of decoder calls, the plan of those that get a graph, and the one rule that picks a graph for a call."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Literal, NamedTuple

from omnigraph._files import FileError, read_json, write_json
from omnigraph._html import table

SCHEMA = "omnigraph.plan/1"
MAX_WASTE = 2.0  # without measured costs: decode at most this many times the frames that were asked for


class Shape(NamedTuple):
    """`(batch, frames)` of one decoder call."""

    batch: int
    frames: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.frames}"


class Bucket(NamedTuple):
    """A shape that has a captured graph, plain or compiled."""

    shape: Shape
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.shape}{' compiled' if self.compiled else ''}"


How = Literal["eager", "plain", "compiled"]
Cost = Callable[[Shape, How], float]  # milliseconds of one call of a shape, run that way
Calls = Mapping[Shape, int]  # how often each shape is called
Kind = Literal["exact", "padded", "split"]
Miss = Literal["no_bucket", "too_much_padding", "eager_is_faster"]


class Part(NamedTuple):
    """`rows` rows of a call, decoded by one replay of `bucket`."""

    bucket: Bucket
    rows: int


@dataclass(frozen=True, slots=True)
class Route:
    """Which replays serve a call: one part, several (a split of the batch), or none and why (`miss`)."""

    shape: Shape
    parts: tuple[Part, ...]
    miss: Miss | None = None

    @property
    def kind(self) -> Kind | None:
        if len(self.parts) > 1:
            return "split"
        if not self.parts:
            return None
        return "exact" if self.parts[0].bucket.shape == self.shape else "padded"

    @property
    def padding(self) -> int:
        """Frames decoded beyond those asked for, over all rows."""
        return sum(p.bucket.shape.batch * p.bucket.shape.frames for p in self.parts) - self.shape.batch * self.shape.frames * bool(
            self.parts
        )


def _shape(value: Sequence[int]) -> Shape:
    """Check one shape.

    >>> _shape([4, 25])
    Shape(batch=4, frames=25)
    """
    try:
        batch, frames = map(index, value)  # numpy's integers too
    except (TypeError, ValueError):
        batch = frames = 0
    if batch < 1 or frames < 1 or any(isinstance(n, bool) for n in value):
        raise ValueError(f"a shape is (batch, frames), both positive integers; got {value!r}")
    return Shape(batch, frames)


def _once(what: str, values: Iterable[Shape]) -> tuple[Shape, ...]:
    shapes = [_shape(value) for value in values]
    twice = sorted(str(shape) for shape, times in Counter(shapes).items() if times > 1)
    if twice:
        raise ValueError(f"{what} lists {', '.join(twice)} more than once")
    return tuple(sorted(shapes))


@dataclass(frozen=True)
class BucketPlan:
    """The shapes to capture: `plain` ones, and `compiled` ones (`torch.compile` first, then a graph).

    `made_for` says for which model, dtype and device the plan was chosen, where that is known.

    Raises:
        ValueError: the plan is empty, a shape is not two positive integers, or one is listed twice.
    """

    plain: tuple[Shape, ...] = ()
    compiled: tuple[Shape, ...] = ()
    made_for: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain", _once("plain", self.plain))
        object.__setattr__(self, "compiled", _once("compiled", self.compiled))
        if not self.plain and not self.compiled:
            raise ValueError("an empty plan captures nothing: give at least one (batch, frames)")

    @classmethod
    def grid(
        cls,
        batch_sizes: Sequence[int],
        sizes: Sequence[int],
        extra: Iterable[Sequence[int]] = (),
        compiled: Iterable[Sequence[int]] = (),
    ) -> BucketPlan:
        """Every batch size with every size in frames, and `extra` shapes; those in `compiled` are compiled instead of plain.

        >>> BucketPlan.grid([1, 4], [25, 50], extra=[(8, 25)], compiled=[(1, 25)])
        BucketPlan(plain=1x50 4x25 4x50 8x25, compiled=1x25)
        """
        for name, numbers in (("batch_sizes", batch_sizes), ("sizes", sizes)):
            if len(set(numbers)) < len(numbers):
                raise ValueError(f"{name} lists a number more than once: {list(numbers)}")
        plain = _once("the grid with extra", [*(Shape(b, f) for b in batch_sizes for f in sizes), *map(_shape, extra)])
        chosen = _once("compiled", map(_shape, compiled))
        return cls(tuple(s for s in plain if s not in chosen), chosen)

    @classmethod
    def from_chunking(
        cls,
        chunk_size: int,
        left_context_size: int,
        batch_sizes: Sequence[int] = (1,),
        offline_chunk_size: int = 300,
        offline_left_context_size: int = 25,
    ) -> BucketPlan:
        """The usual heuristic: the sizes that chunking makes, and powers of two for what is left over.

        Sizes in frames: 2 to 256 in powers of two up to the offline window, the streaming chunk (0: offline only), chunk plus
        context, and the offline window. The heuristic of vLLM-Omni's codec decoder wrapper.

        >>> [s.frames for s in BucketPlan.from_chunking(25, 25).plain]
        [2, 4, 8, 16, 25, 32, 50, 64, 128, 256, 325]
        """
        if min(chunk_size, left_context_size, offline_left_context_size) < 0 or offline_chunk_size < 1:
            raise ValueError(
                f"chunk sizes and contexts are frames, not negative, the offline chunk at least 1; got {chunk_size=}, "
                f"{left_context_size=}, {offline_chunk_size=}, {offline_left_context_size=}"
            )
        window = offline_chunk_size + offline_left_context_size
        sizes = {2**n for n in range(1, 9) if 2**n <= window} | {window}
        if chunk_size:
            sizes |= {chunk_size, chunk_size + left_context_size}
        return cls.grid(batch_sizes, sorted(sizes))

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All of them, the largest first: the order in which graphs that share a pool take least memory."""
        listed = [*(Bucket(s, True) for s in self.compiled), *(Bucket(s) for s in self.plain)]
        return tuple(sorted(listed, key=lambda b: (-b.shape.batch * b.shape.frames, b)))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as JSON (schema omnigraph.plan/1)."""
        content = {"plain": list(self.plain), "compiled": list(self.compiled), "made_for": dict(self.made_for)}
        return write_json(path, SCHEMA, content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BucketPlan:
        """Read what `save` wrote.

        Raises:
            FileError: another schema, or shapes that cannot be captured.
        """
        content = read_json(path, SCHEMA)
        try:
            plain, compiled = (tuple(_shape(s) for s in content[name]) for name in ("plain", "compiled"))
            return cls(plain, compiled, {str(k): str(v) for k, v in content["made_for"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileError(f"{path}: not a plan: {error!r}") from error

    def __len__(self) -> int:
        return len(self.plain) + len(self.compiled)

    def __repr__(self) -> str:
        parts = [f"{name}={' '.join(map(str, shapes))}" for name, shapes in (("plain", self.plain), ("compiled", self.compiled)) if shapes]
        return f"BucketPlan({', '.join(parts)})"

    def _repr_html_(self) -> str:
        batches = sorted({bucket.shape.batch for bucket in self.buckets})
        rows = [[b, *(", ".join(str(s.frames) for s in shapes if s.batch == b) for shapes in (self.plain, self.compiled))] for b in batches]
        made_for = f"made for {', '.join(self.made_for.values())}" if self.made_for else ""
        return table(
            f"BucketPlan: {len(self)} bucket{'s' * (len(self) != 1)}", ["batch", "plain (frames)", "compiled (frames)"], rows, [made_for]
        )


def _padded(shape: Shape, how: How) -> float:
    """The cost of a call where none was measured: the frames it decodes."""
    return shape.batch * shape.frames


def route(
    shape: Shape,
    captured: Collection[Bucket],
    cost: Cost | None = None,
    *,
    pad_frames: bool = True,
    pad_batch: bool = True,
    split: bool = True,
    max_waste: float = MAX_WASTE,
) -> Route:
    """Pick the replays that serve a call of `shape`, or none: then the call goes eager.

    The candidates are every bucket that holds the call in batch and frames, and every split of its rows over several buckets;
    with `cost`, eager too. The cheapest wins: by `cost` in milliseconds where given, else by batch x frames, as long as that is
    at most `max_waste` times what was asked for. Ties go to fewer replays, then to compiled. `pad_frames`, `pad_batch` and `split`
    say what may be done to the call: a decoder that looks ahead cannot be padded, one that mixes rows cannot be split.

    The split is exact: dynamic programming over the rows still to be served (the unbounded knapsack recurrence).

    >>> route(Shape(1, 41), [Bucket(Shape(1, 50)), Bucket(Shape(1, 64))]).parts
    (Part(bucket=Bucket(shape=Shape(batch=1, frames=50), compiled=False), rows=1),)
    >>> [str(p.bucket) for p in route(Shape(5, 25), [Bucket(Shape(b, 25)) for b in (1, 4, 8)]).parts]
    ['4x25', '1x25']
    >>> route(Shape(1, 300), [Bucket(Shape(1, 50))]).miss
    'no_bucket'
    """
    price = cost or _padded
    best: dict[int, tuple[float, bool, int, Bucket]] = {}  # the cheapest bucket of each batch size
    for bucket in captured:
        (batch, frames), compiled = bucket
        if frames == shape.frames or (pad_frames and frames > shape.frames):
            rank = (price(bucket.shape, "compiled" if compiled else "plain"), not compiled, frames, bucket)
            if batch not in best or rank < best[batch]:
                best[batch] = rank
    rows = shape.batch
    done: list[tuple[float, int, tuple[bool, ...], tuple[Part, ...]] | None] = [(0.0, 0, (), ())]
    for n in range(1, rows + 1):
        options = []
        for batch, (paid, plain, _, bucket) in best.items():
            rest = done[max(n - batch, 0)]
            if rest is not None and (batch <= n or pad_batch) and (split or batch >= rows):
                options.append((paid + rest[0], 1 + rest[1], (plain, *rest[2]), (Part(bucket, min(batch, n)), *rest[3])))
        done.append(min(options) if options else None)
    found = done[rows]
    if found is None:
        return Route(shape, (), "no_bucket")
    paid, parts = found[0], tuple(sorted(found[3], key=lambda p: -p.rows))
    if cost is None and paid > max_waste * shape.batch * shape.frames:
        return Route(shape, (), "too_much_padding")
    if cost is not None and paid > cost(shape, "eager"):
        return Route(shape, (), "eager_is_faster")
    return Route(shape, parts)
