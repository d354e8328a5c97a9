"""What a panel is set to, as plain facts: entries read or refused, and the plan and the calls that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from omnigraph._owner import Padding as Policy
from omnigraph.planner import PlanReport
from omnigraph.profile import Profile
from omnigraph.serving import simulate
from omnigraph.shapes import Bucket, BucketPlan, Calls, Shape
from omnigraph.trace import Trace

Preset = Literal["by hand", "chunking heuristic", "powers of two", "best for so many graphs", "best for so much memory"]
SEARCHED: tuple[Preset, ...] = ("best for so many graphs", "best for so much memory")
LARGEST = 2**20  # frames of one bucket, over all rows
MOST = 512  # buckets of a plan


@dataclass(frozen=True)
class Traffic:
    """What makes the calls: a trace, how its requests are cut, how fast they come, how many chunks one call may take."""

    trace: Trace
    chunk_size: int = 25
    left_context_size: int = 25
    ramp: tuple[int, ...] = ()
    load: float = 1.0
    max_batch: int = 1

    @property
    def cut(self) -> dict[str, Any]:
        """The keywords of `simulate` that say how requests become calls."""
        sizes = {"chunk_size": self.chunk_size, "left_context_size": self.left_context_size, "ramp": self.ramp}
        return {**sizes, "max_batch": self.max_batch}

    def __str__(self) -> str:
        ramp = f" after {', '.join(map(str, self.ramp))}" if self.ramp else ""
        batch = f", batches of up to {self.max_batch} at load {self.load:g}" if self.max_batch > 1 else ""
        return f"{self.trace.name}, chunks of {self.chunk_size}{ramp} with {self.left_context_size} of context{batch}"


@dataclass(frozen=True)
class Wish:
    """What makes the plan: a preset with its limit, or buckets by hand. Of `sizes`, lengths are captured at every batch size."""

    preset: Preset = "chunking heuristic"
    graphs: int = 4
    mib: float = 256.0
    batch_sizes: tuple[int, ...] = (1,)
    sizes: tuple[int | Shape, ...] = ()
    compiled: tuple[Shape, ...] = ()
    padding: Policy = "auto"


@dataclass(frozen=True)
class State:
    """All that the panel's figures depend on."""

    traffic: Traffic
    wish: Wish
    profile: Profile | None
    view: str


def calls_of(traffic: Traffic, profile: Profile | None) -> Calls:
    """How often each shape is called. Which chunks share a call depends on times: it is simulated, with the usual buckets.

    Raises:
        ValueError: batches are asked for, and there are no times to simulate with.
    """
    if traffic.max_batch == 1:
        return traffic.trace.calls(traffic.chunk_size, traffic.left_context_size, traffic.ramp)
    if profile is None:
        raise ValueError("which chunks share a call depends on times: measure a profile first, or set batching to 1")
    usual = heuristic(traffic, powers(traffic.max_batch))
    return simulate(traffic.trace.scale(traffic.load), profile, usual, **traffic.cut).calls


def powers(last: int) -> list[int]:
    """Powers of two up to `last`.

    >>> powers(8)
    [1, 2, 4, 8]
    """
    return [2**n for n in range(last.bit_length())]


def heuristic(traffic: Traffic, batch_sizes: Sequence[int]) -> BucketPlan:
    """`BucketPlan.from_chunking`, up to the longest call that streaming makes."""
    window = traffic.chunk_size + traffic.left_context_size
    return BucketPlan.from_chunking(traffic.chunk_size, traffic.left_context_size, batch_sizes, window, 0)


def plan_of(wish: Wish, traffic: Traffic, calls: Calls, report: PlanReport | None = None) -> BucketPlan | None:
    """The plan that is wished for, None where it has no bucket. Searched presets take theirs from `report`.

    The best plan for a number of graphs is a point of the report's curve, and so is that for an amount of memory: the fastest one
    that fits, among the best of each number of graphs.
    """
    if wish.preset in SEARCHED:
        assert report is not None
        most, room = (wish.graphs, math.inf) if wish.preset == SEARCHED[0] else (math.inf, wish.mib * 2**20)
        fitting = [point for point in report.curve if point.graphs <= most and point.pool_bytes <= room]
        buckets = min(fitting, key=lambda point: point.ms).buckets if fitting else ()
        return plan_from(buckets)
    if wish.preset == "chunking heuristic":
        shapes = heuristic(traffic, wish.batch_sizes).plain
    elif wish.preset == "powers of two":
        longest = max(shape.frames for shape in calls)
        shapes = BucketPlan.grid(wish.batch_sizes, [*powers(longest - 1), 2 ** (longest - 1).bit_length()]).plain
    else:
        lengths = [size for size in wish.sizes if not isinstance(size, Shape)]
        grid = {Shape(batch, frames) for batch in wish.batch_sizes for frames in lengths}
        shapes = tuple(grid | {size for size in wish.sizes if isinstance(size, Shape)})
    return plan_from([*(Bucket(s) for s in shapes if s not in wish.compiled), *(Bucket(s, True) for s in wish.compiled)])


def plan_from(buckets: Iterable[Bucket]) -> BucketPlan | None:
    """A plan of these buckets, or None where there are none.

    Raises:
        ValueError: more buckets than a panel can follow.
    """
    plain, compiled = ({b.shape for b in buckets if b.compiled == kind} for buckets in [list(buckets)] for kind in (False, True))
    if len(plain) + len(compiled) > MOST:
        raise ValueError(f"this makes {len(plain) + len(compiled):,} buckets; the panel takes {MOST} at most: remove sizes or batch sizes")
    return BucketPlan(tuple(plain), tuple(compiled)) if plain or compiled else None


def tags_of(plan: BucketPlan | None, batch_sizes: Sequence[int]) -> tuple[list[str], list[str]]:
    """The tags of sizes and of compiled shapes that make `plan`: a length where every batch size has it, else batch x length.

    >>> tags_of(BucketPlan.grid([1, 4], [25, 50], extra=[(8, 25)]), [1, 4])
    (['25', '50', '8x25'], [])
    """
    shapes = set(plan.plain if plan else ())
    whole = {frames for _, frames in shapes if batch_sizes and all((b, frames) in shapes for b in batch_sizes)}
    single = sorted(s for s in shapes if s.frames not in whole or s.batch not in batch_sizes)
    return [*map(str, sorted(whole)), *map(str, single)], [str(s) for s in (plan.compiled if plan else ())]


def read_whole(text: str, what: str, least: int, most: int) -> int:
    """A whole number within bounds.

    >>> read_whole("0", "a chunk", 1, 100)
    Traceback (most recent call last):
    ValueError: a chunk is a whole number from 1 to 100, not '0'
    """
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise ValueError(f"{what} is a whole number from {least:,} to {most:,}, not {text.strip()!r}")
    return number


def read_numbers(texts: Iterable[str], what: str, most: int) -> tuple[int, ...]:
    """Positive whole numbers, in their order."""
    return tuple(read_whole(text, what, 1, most) for text in texts)


def read_mib(text: str) -> float:
    """A positive amount of memory in MiB."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"memory is a number of MiB above 0, not {text.strip()!r}")
    return number


def read_shape(text: str) -> Shape:
    """Batch x frames of a bucket.

    >>> read_shape("4x25")
    Shape(batch=4, frames=25)
    """
    batch, cross, frames = text.strip().lower().replace("×", "x").partition("x")
    if not cross:
        raise ValueError(f"a shape is batch x frames, as in 4x50, not {text!r}")
    found = Shape(read_whole(batch, "a batch size", 1, LARGEST), read_whole(frames, "a length in frames", 1, LARGEST))
    if found.batch * found.frames > LARGEST:
        raise ValueError(f"{found} has {found.batch * found.frames:,} frames in all; a bucket has {LARGEST:,} at most")
    return found


def read_size(text: str) -> int | Shape:
    """A length in frames, or one shape."""
    return read_shape(text) if {*"xX×"} & {*text} else read_whole(text, "a bucket size", 1, LARGEST)
