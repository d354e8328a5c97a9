"""Plans and chunk settings as deploy files of vLLM-Omni, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnigraph._export import Exported, differences, numbers, tree
from omnigraph._needs import need
from omnigraph.shapes import BucketPlan

CONNECTOR = "connector_of_shared_memory"
_ALWAYS = 150  # a size that vLLM-Omni's wrapper adds to those for whole utterances


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


def from_vllm_omni(text: str, connector: str | None = None) -> VllmOmni:
    """Read a deploy file of vLLM-Omni, or a fragment of one; `connector` names one of several.

    Raises:
        ValueError: it is no YAML, no connector says anything of a decoder (or several do), or a value is no whole number.
    """
    file = tree(text)
    connectors = file.get("connectors") if isinstance(file, Mapping) else None
    extras: dict[str, Mapping[str, Any]] = {}
    for name, each in (connectors if isinstance(connectors, Mapping) else {}).items():
        found = each.get("extra") if isinstance(each, Mapping) else None
        if isinstance(found, Mapping) and any(str(key).startswith(("codec_", "decode_")) for key in found) and connector in (None, name):
            extras[name] = found
    if len(extras) != 1:
        raise ValueError(f"expected one of connectors.<name>.extra with codec_ or decode_ keys, found {sorted(extras) or 'none'}")
    (extra,) = extras.values()
    default = VllmOmni()

    def one(key: str, otherwise: int) -> int:
        return (numbers(extra.get(key), key) or (otherwise,))[0]

    return VllmOmni(
        one("codec_chunk_frames", default.chunk_size),
        one("codec_left_context_frames", default.left_context_size),
        numbers(extra.get("codec_chunk_ramp"), "codec_chunk_ramp")
        or numbers(extra.get("initial_codec_chunk_frames"), "initial_codec_chunk_frames"),
        one("decode_chunk_frames", default.offline_chunk_size),
        one("decode_left_context_frames", default.offline_left_context_size),
        numbers(extra.get("decode_cudagraph_capture_sizes"), "decode_cudagraph_capture_sizes"),
        numbers(extra.get("decode_cudagraph_batch_sizes"), "decode_cudagraph_batch_sizes") or default.batch_sizes,
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
        max_batch: most rows decoded together; the system's own where left out.
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
        max_batch,
    )
    target = settings.plan(streaming=streaming)
    losses = differences(plan, target)
    if streaming:
        why = f"when it streams, vLLM-Omni captures the lengths of full chunks with their context, {list(settings.streaming_sizes)}"
        losses.insert(0, f"{why}, whatever decode_cudagraph_capture_sizes says: that is for whole utterances")
    return Exported(settings.to_yaml(connector), target, tuple(losses))
