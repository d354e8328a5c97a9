"""Plans as settings of the serving systems that capture graphs themselves, and back; what they cannot say is said in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnigraph._needs import need
from omnigraph.shapes import BucketPlan, Shape


@dataclass(frozen=True)
class Exported:
    """Settings for another system: the `text` of a file, the `plan` that it captures then, and what is lost on the way."""

    text: str
    plan: BucketPlan
    losses: tuple[str, ...]

    def __str__(self) -> str:
        return "".join([self.text, *(f"# {loss}\n" for loss in self.losses)])


def numbers(value: Any, name: str) -> tuple[int, ...]:
    """Whole numbers, as a list or as text with commas.

    >>> numbers("4, 4,8", "ramp"), numbers([25], "ramp"), numbers(None, "ramp")
    ((4, 4, 8), (25,), ())
    """
    parts = value.split(",") if isinstance(value, str) else [] if value is None else value if isinstance(value, list) else [value]
    try:
        if any(isinstance(part, (bool, float)) for part in parts):
            raise ValueError
        return tuple(int(part) for part in parts)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be whole numbers, got {value!r}") from error


def tree(text: str) -> Any:
    yaml = need("yaml")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from error


def differences(plan: BucketPlan, target: BucketPlan) -> list[str]:
    """What a target that captures `target` makes of `plan`."""
    wanted, there, losses = {*plan.plain, *plan.compiled}, {*target.plain, *target.compiled}, []
    compiled = [s for s in plan.compiled if s in target.plain]
    if compiled:
        losses.append(f"captured plain, not compiled: {listed(compiled)}")
    if wanted - there:
        losses.append(f"not captured: {listed(wanted - there)}")
    if there - wanted:
        losses.append(f"captured besides: {listed(there - wanted)}")
    return losses


def listed(shapes: Iterable[Shape]) -> str:
    """The shapes in words.

    >>> listed([Shape(4, 25), Shape(1, 25)])
    '1x25 4x25'
    """
    return " ".join(map(str, sorted(shapes)))


def to_wrapper(plan: BucketPlan) -> tuple[dict[str, list[Any]], tuple[str, ...]]:
    """A plan as arguments of the decoder wrapper of earlier versions of vLLM-Omni, and what is lost.

    The wrapper captures single shapes, so nothing is lost in the plan; but it picks the next size first and then needs that size
    at the call's exact batch. Batch sizes that lack a size that another has are named.

    >>> to_wrapper(BucketPlan.grid([1, 4], [25, 50], extra=[(8, 25)]))[0]
    {'capture_sizes': [25, 50], 'capture_batch_sizes': [1, 4], 'extra_capture_shapes': [(8, 25)], 'compile_shapes': []}
    """
    frames = {b: {s.frames for s in plan.plain if s.batch == b} for b in {s.batch for s in plan.plain}}
    sizes = max(frames.values(), key=len, default=set())
    batches = sorted(b for b, own in frames.items() if own >= sizes)
    extra = [tuple(s) for s in plan.plain if not (s.batch in batches and s.frames in sizes)]
    every = {s.frames for s in plan.plain} | {s.frames for s in plan.compiled}
    have = {b: {s.frames for s in (*plan.plain, *plan.compiled) if s.batch == b} for b in {s.batch for s in (*plan.plain, *plan.compiled)}}
    losses = [
        f"calls of batch {b} whose next size is one of {sorted(every - own)} go eager: it does not look for a longer bucket"
        for b, own in sorted(have.items())
        if {f for f in every - own if f < max(own)}
    ]
    losses.append("calls of a batch size without buckets of its own go eager: it neither pads nor splits a batch")
    arguments: dict[str, list[Any]] = {
        "capture_sizes": sorted(sizes),
        "capture_batch_sizes": batches,
        "extra_capture_shapes": extra,
        "compile_shapes": [tuple(s) for s in plan.compiled],
    }
    return arguments, tuple(losses)


def from_wrapper(
    capture_sizes: Sequence[int] = (),
    capture_batch_sizes: Sequence[int] = (1,),
    extra_capture_shapes: Iterable[Sequence[int]] = (),
    compile_shapes: Iterable[Sequence[int]] = (),
) -> BucketPlan:
    """The plan that such arguments mean."""
    compiled = [Shape(*s) for s in compile_shapes]
    grid = {Shape(b, f) for b in capture_batch_sizes for f in capture_sizes} | {Shape(*s) for s in extra_capture_shapes}
    return BucketPlan(tuple(sorted(grid)), tuple(compiled))


def to_vllm(plan: BucketPlan) -> Exported:
    """A plan as vLLM's `compilation_config` (JSON): its capture sizes are tokens a step, one a frame of every row.

    >>> print(to_vllm(BucketPlan.grid([1, 4], [25])).text)
    {"cudagraph_capture_sizes": [25, 100]}
    """
    shapes = {*plan.plain, *plan.compiled}
    sizes = sorted({s.batch * s.frames for s in shapes})
    losses = []
    if any(s.batch > 1 for s in shapes):
        losses.append("batch and frames become one number, frames in all: shapes of the same product share a graph")
    if plan.compiled:
        losses.append(f"compiled or plain is one mode for all sizes: {listed(plan.compiled)} are not told apart")
    target = BucketPlan(tuple(Shape(1, n) for n in sizes))
    return Exported(json.dumps({"cudagraph_capture_sizes": sizes}), target, tuple(losses))


def from_vllm(text: str) -> BucketPlan:
    """Read a `compilation_config`, alone or in a file that holds one: its sizes as buckets of one row.

    Raises:
        ValueError: it is no YAML or JSON, or says no capture sizes.
    """
    found = tree(text)
    if isinstance(found, Mapping) and "compilation_config" in found:
        found = found["compilation_config"]
    sizes = numbers(found.get("cudagraph_capture_sizes"), "cudagraph_capture_sizes") if isinstance(found, Mapping) else ()
    if not sizes:
        raise ValueError("expected cudagraph_capture_sizes in a compilation_config, found none")
    return BucketPlan(tuple(Shape(1, n) for n in sizes))
