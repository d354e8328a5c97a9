"""Plans as settings of the serving systems that capture graphs themselves, and back; what they cannot say is said in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnigraph._needs import need
from omnigraph.shapes import BucketPlan, Shape

CONNECTOR = "connector_of_shared_memory"
_ALWAYS = 150  # a size that vLLM-Omni's wrapper adds to those for whole utterances


@dataclass(frozen=True)
class Exported:
    """Settings for another system: the `text` of a file, the `plan` that it captures then, and what is lost on the way."""

    text: str
    plan: BucketPlan
    losses: tuple[str, ...]

    def __str__(self) -> str:
        return "".join([self.text, *(f"# {loss}\n" for loss in self.losses)])


@dataclass(frozen=True)
class VllmOmni:
    """What vLLM-Omni's deploy files (version 0.30) say of a speech decoder, under `connectors.<name>.extra`; sizes in frames.

    `ramp` holds the first chunks' sizes; `sizes` and `batch_sizes` are the grid captured for whole utterances.
    """

    chunk_size: int = 25
    left_context_size: int = 25
    ramp: tuple[int, ...] = ()
    offline_chunk_size: int = 300
    offline_left_context_size: int = 25
    sizes: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = (1,)
    max_batch: int | None = None

    def __post_init__(self) -> None:
        least = {"chunk_size": 1, "left_context_size": 0, "offline_chunk_size": 1, "offline_left_context_size": 0}
        wrong = [name for name, n in least.items() if getattr(self, name) < n]
        wrong += [name for name in ("ramp", "sizes", "batch_sizes") if any(n < 1 for n in getattr(self, name))]
        if wrong or not self.batch_sizes or (self.max_batch is not None and self.max_batch < 1):
            raise ValueError(f"sizes are positive and contexts not negative; got {', '.join(wrong) or 'no batch size'} in {self}")

    @property
    def streaming_sizes(self) -> tuple[int, ...]:
        """The lengths of the full chunks of a stream, each with its context: what the system captures when it streams.

        >>> VllmOmni(25, 72, (4, 4, 8, 16, 25)).streaming_sizes
        (4, 8, 16, 32, 57, 82, 97)
        """
        start, ramp, found = 0, list(self.ramp), set()
        while ramp or start < self.left_context_size:
            size = ramp.pop(0) if ramp else self.chunk_size
            found.add(min(start, self.left_context_size) + size)
            start += size
        return tuple(sorted({*found, self.left_context_size + self.chunk_size}))

    def plan(self, *, streaming: bool) -> BucketPlan:
        """What the system captures: for streams the sizes of full chunks, for whole utterances `sizes`, its window and 150."""
        whole = {*self.sizes, _ALWAYS, self.offline_chunk_size + self.offline_left_context_size}
        return BucketPlan.grid(sorted(set(self.batch_sizes)), self.streaming_sizes if streaming else sorted(whole))

    def to_yaml(self, connector: str = CONNECTOR) -> str:
        """The fragment for a deploy file."""
        extra: dict[str, Any] = {"codec_chunk_frames": self.chunk_size, "codec_left_context_frames": self.left_context_size}
        if len(self.ramp) == 1:
            extra["initial_codec_chunk_frames"] = self.ramp[0]
        elif self.ramp:
            extra["codec_chunk_ramp"] = list(self.ramp)
        extra |= {"decode_chunk_frames": self.offline_chunk_size, "decode_left_context_frames": self.offline_left_context_size}
        if self.sizes:
            extra["decode_cudagraph_capture_sizes"] = list(self.sizes)
        extra["decode_cudagraph_batch_sizes"] = list(self.batch_sizes)
        if self.max_batch is not None:
            extra["decode_batch_max_size"] = self.max_batch
        text: str = need("yaml").safe_dump({"connectors": {connector: {"extra": extra}}}, sort_keys=False, default_flow_style=None)
        return text


def _numbers(value: Any, name: str) -> tuple[int, ...]:
    """Whole numbers, as a list or as text with commas.

    >>> _numbers("4, 4,8", "ramp"), _numbers([25], "ramp"), _numbers(None, "ramp")
    ((4, 4, 8), (25,), ())
    """
    parts = value.split(",") if isinstance(value, str) else [] if value is None else value if isinstance(value, list) else [value]
    try:
        if any(isinstance(part, (bool, float)) for part in parts):
            raise ValueError
        return tuple(int(part) for part in parts)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be whole numbers, got {value!r}") from error


def _tree(text: str) -> Any:
    yaml = need("yaml")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from error


def from_vllm_omni(text: str, connector: str | None = None) -> VllmOmni:
    """Read a deploy file of vLLM-Omni, or a fragment of one; `connector` names one of several.

    Raises:
        ValueError: it is no YAML, no connector says anything of a decoder (or several do), or a value is no whole number.
    """
    tree = _tree(text)
    found = tree.get("connectors") if isinstance(tree, Mapping) else None
    extras = {name: each.get("extra") for name, each in (found or {}).items() if isinstance(each, Mapping)}
    extras = {
        name: extra
        for name, extra in extras.items()
        if isinstance(extra, Mapping) and any(str(key).startswith(("codec_", "decode_")) for key in extra) and connector in (None, name)
    }
    if len(extras) != 1:
        raise ValueError(f"expected one of connectors.<name>.extra with codec_ or decode_ keys, found {sorted(extras) or 'none'}")
    (extra,) = extras.values()
    default = VllmOmni()

    def one(key: str, otherwise: int) -> int:
        return (_numbers(extra.get(key), key) or (otherwise,))[0]

    return VllmOmni(
        one("codec_chunk_frames", default.chunk_size),
        one("codec_left_context_frames", default.left_context_size),
        _numbers(extra.get("codec_chunk_ramp"), "codec_chunk_ramp")
        or _numbers(extra.get("initial_codec_chunk_frames"), "initial_codec_chunk_frames"),
        one("decode_chunk_frames", default.offline_chunk_size),
        one("decode_left_context_frames", default.offline_left_context_size),
        _numbers(extra.get("decode_cudagraph_capture_sizes"), "decode_cudagraph_capture_sizes"),
        _numbers(extra.get("decode_cudagraph_batch_sizes"), "decode_cudagraph_batch_sizes") or default.batch_sizes,
        one("decode_batch_max_size", 0) or None,
    )


def to_vllm_omni(
    plan: BucketPlan,
    *,
    chunk_size: int,
    left_context_size: int,
    ramp: Sequence[int] = (),
    offline_chunk_size: int = 300,
    offline_left_context_size: int = 25,
    max_batch: int | None = None,
    streaming: bool = True,
    connector: str = CONNECTOR,
) -> Exported:
    """A plan as a YAML fragment for a deploy file of vLLM-Omni 0.30.

    It captures a grid of batch sizes by sizes, plain, and when it streams it derives the sizes itself; `losses` says what differs.

    Args:
        plan: the buckets.
        chunk_size, left_context_size, ramp: of a stream, in frames.
        offline_chunk_size, offline_left_context_size: of whole utterances, in frames.
        max_batch: most rows decoded together; the plan's largest batch where left out.
        streaming: whether the server streams, which decides what it captures.
        connector: the connector's name in the deploy file.

    Raises:
        ValueError: a size is not positive.
    """
    shapes = sorted({*plan.plain, *plan.compiled})
    batches, sizes = sorted({s.batch for s in shapes}), sorted({s.frames for s in shapes})
    settings = VllmOmni(
        chunk_size,
        left_context_size,
        tuple(ramp),
        offline_chunk_size,
        offline_left_context_size,
        tuple(sizes),
        tuple(batches),
        max_batch or batches[-1],
    )
    target = settings.plan(streaming=streaming)
    losses = _differences(plan, target)
    if streaming:
        why = f"when it streams, vLLM-Omni captures the lengths of full chunks with their context, {list(settings.streaming_sizes)}"
        losses.insert(0, f"{why}, whatever decode_cudagraph_capture_sizes says: that is for whole utterances")
    return Exported(settings.to_yaml(connector), target, tuple(losses))


def _differences(plan: BucketPlan, target: BucketPlan) -> list[str]:
    """What a target that captures `target` makes of `plan`."""
    wanted, there, losses = {*plan.plain, *plan.compiled}, {*target.plain, *target.compiled}, []
    compiled = [s for s in plan.compiled if s in target.plain]
    if compiled:
        losses.append(f"captured plain, not compiled: {_listed(compiled)}")
    if wanted - there:
        losses.append(f"not captured: {_listed(wanted - there)}")
    if there - wanted:
        losses.append(f"captured besides: {_listed(there - wanted)}")
    return losses


def _listed(shapes: Iterable[Shape]) -> str:
    """The shapes in words.

    >>> _listed([Shape(4, 25), Shape(1, 25)])
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
        losses.append(f"compiled or plain is one mode for all sizes: {_listed(plan.compiled)} are not told apart")
    target = BucketPlan(tuple(Shape(1, n) for n in sizes))
    return Exported(json.dumps({"cudagraph_capture_sizes": sizes}), target, tuple(losses))


def from_vllm(text: str) -> BucketPlan:
    """Read a `compilation_config`, alone or in a file that holds one: its sizes as buckets of one row.

    Raises:
        ValueError: it is no YAML or JSON, or says no capture sizes.
    """
    tree = _tree(text)
    if isinstance(tree, Mapping) and "compilation_config" in tree:
        tree = tree["compilation_config"]
    sizes = _numbers(tree.get("cudagraph_capture_sizes"), "cudagraph_capture_sizes") if isinstance(tree, Mapping) else ()
    if not sizes:
        raise ValueError("expected cudagraph_capture_sizes in a compilation_config, found none")
    return BucketPlan(tuple(Shape(1, n) for n in sizes))
