"""The memory that an owner's graphs share, the order of their launches, and what a callable's kernels depend on besides its inputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakSet, WeakValueDictionary

import torch

from omnigraph._record import Arena
from omnigraph._recorder import recording

Backend = Literal["cuda", "cpu"]


def pick_backend(backend: str, device: torch.device) -> Backend:
    """ "auto" is the device's own; anything else must be it.

    Raises:
        ValueError: an unknown backend, or one that does not run on `device`.
    """
    own = device.type
    if own not in ("cuda", "cpu"):
        raise ValueError(f"graphs run on cuda or cpu, not on {device}; backend='eager' decodes there without graphs")
    if backend not in ("auto", own):
        raise ValueError(f"backend={backend!r} does not run on {device}: pass backend='auto', or move the module with .to({backend!r})")
    return "cuda" if own == "cuda" else "cpu"


def capturing(device: torch.device) -> bool:
    """Is somebody capturing what this thread does now: on CUDA the current stream, on a CPU the operations?"""
    return torch.cuda.is_current_stream_capturing() if device.type == "cuda" else recording()


# Read before each replay, so in C: the public getters of some of these are Python properties of a microsecond or two each.
_ALWAYS = (
    torch.get_default_dtype,
    torch._C._get_deterministic_algorithms,
    torch._C._get_math_sdp_enabled,
    torch._C._get_flash_sdp_enabled,
)
_SWITCHES: dict[str, tuple[Callable[[], object], ...]] = {
    "cpu": (*_ALWAYS, torch._C._get_mkldnn_enabled),
    "cuda": (
        *_ALWAYS,
        torch._C._get_mem_efficient_sdp_enabled,
        torch._C._get_cudnn_sdp_enabled,
        torch._C._get_cudnn_enabled,
        torch._C._get_cudnn_deterministic,
        torch._C._get_cudnn_benchmark,
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    ),
}
# Of float32. This getter knows of the old switches (allow_tf32 and others), while theirs raise once a new one was used.
_PRECISIONS = {kind: [(backend, op) for op in ("matmul", "conv", "rnn")] for kind, backend in (("cuda", "cuda"), ("cpu", "mkldnn"))}


def environment(device: torch.device) -> tuple[object, ...]:
    """The global switches under which a callable runs other kernels, or returns another dtype; equal tuples mean the same."""
    kind = device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    precisions = [torch._C._get_fp32_precision_getter(*operation) for operation in _PRECISIONS.get(kind, ())]
    return (
        autocast,
        *[switch() for switch in _SWITCHES.get(kind, _ALWAYS)],
        *["ieee" if precision == "none" else precision for precision in precisions],  # two names for the same
    )


_STREAMS = WeakValueDictionary[tuple[int, int], "Pool"]()  # which pool captures on which stream


class Pool:
    """The memory that the graphs of one owner share, and the order of their launches.

    `with pool.lock, pool:` is one owner's turn: the host lock is held, and the current stream waits for the turn before. A static output
    is valid until any graph of the pool replays; so copy it out within the turn. (The lock is by itself, since only a lock made in C is
    sure to be released when an interrupt comes.)
    """

    def __init__(self, device: torch.device | str, backend: str = "auto") -> None:
        device = torch.device(device)
        # A device without an index is the current one, which may be another at the next call.
        self.device = torch.empty(0, device=device).device
        self.backend = pick_backend(backend, self.device)
        self.arena = Arena()
        self.lock = threading.RLock()
        if self.backend == "cuda":
            self._index, self._raw_stream = self.device.index, torch._C._cuda_getCurrentRawStream
            self.stream = self._unused_stream()
            self._current, self._raw = self.stream, self.stream.cuda_stream  # that of the turn before
            self._event: torch.cuda.Event | None = None  # the end of that turn, where it must be kept
            self.handles = [torch.cuda.graph_pool_handle()]
        self.graphs: list[object] = []  # torch's, of all captures; see `let_go`
        self.open = WeakSet[object]()  # ours, that may still replay

    def _unused_stream(self) -> torch.cuda.Stream:
        """One that no other pool captures on: torch hands out the same few in turn, and what cuBLAS works in belongs to a stream."""
        for _ in range(64):
            stream = torch.cuda.Stream(self.device)
            if (self._index, stream.cuda_stream) not in _STREAMS:
                break
        _STREAMS[self._index, stream.cuda_stream] = self
        return stream

    def let_go(self, graph: object) -> None:
        """One graph was closed. What it was captured into dies with the last one, and the next capture gets fresh memory.

        Not before: from torch 2.12 on, a CUDA graph that dies frees the cuBLAS workspace of the stream that it was captured on, which
        the others still use (pytorch issue 193402), and its memory would come back with the last one in any case.
        """
        self.open.discard(graph)
        if self.graphs and not self.open:
            self.graphs.clear()
            self.abandon()

    @property
    def closed(self) -> int:
        """CUDA graphs that are closed and still held."""
        return len(self.graphs) - len(self.open) if self.graphs else 0

    def __enter__(self) -> Pool:
        if self.backend == "cuda" and self._raw_stream(self._index) != self._raw:
            self._follow()
        return self

    def __exit__(self, *_: object) -> None:
        if self.backend == "cuda" and self._event is not None:
            self._event.record(self._current)

    def capturing(self) -> bool:
        """`capturing(self.device)` without asking the driver about the legacy default stream, which cannot be captured."""
        if self.backend == "cpu":
            return recording()
        return self._raw_stream(self._index) != 0 and torch._C._cuda_isCurrentStreamCapturing()

    def in_order(self) -> bool:
        """Is the current stream that of the turn before, and torch's own? Then the lock alone makes a turn."""
        return self.backend == "cpu" or (self._raw_stream(self._index) == self._raw and self._event is None)

    def _follow(self) -> None:
        """Another stream takes its turn: let it wait for the turn before. Work of the same stream is in order as it is.

        The wait is for all that the other stream holds by now: no event is recorded at the end of each turn, which would cost every call
        some microseconds. Torch's own streams live for ever; a stream of somebody else's may be gone by then, so there the event is kept.
        """
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._current.record_event() if self._event is None else self._event)
        self._current, self._raw = stream, stream.cuda_stream
        self._event = torch.cuda.Event() if stream.stream_id == stream.cuda_stream != 0 else None

    def wait(self) -> None:
        """Block the host until the last turn's work is done."""
        if self.backend == "cuda":  # not for the whole device: CUDA refuses that while another thread captures
            (self._current if self._event is None else self._event).synchronize()

    def abandon(self) -> None:
        """Put later captures into fresh memory: after a failed one, torch versions differ in what is left in the old."""
        if self.backend == "cuda":
            self.handles.append(torch.cuda.graph_pool_handle())

    @property
    def nbytes(self) -> int:
        """Bytes that the pool holds on the device."""
        if self.backend == "cpu":
            return self.arena.nbytes
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) in self.handles)

    def warm(self, fn: Callable[..., Any], *inputs: Any, times: int = 1) -> None:
        """Run `fn` as a capture would find it: on the pool's stream, which then holds the workspaces that libraries make at first use."""
        with quiet(self.device):
            if self.backend == "cpu":
                for _ in range(times):
                    fn(*inputs)
                return
            current = torch.cuda.current_stream(self.device)
            self.stream.wait_stream(current)
            try:
                with torch.cuda.stream(self.stream):
                    for _ in range(times):
                        fn(*inputs)
            finally:
                current.wait_stream(self.stream)


@contextmanager
def quiet(device: torch.device) -> Iterator[None]:
    """The module's device, no gradients, no inference tensors, and no autocast cache (its weight copies would die after us)."""
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device if device.type == "cuda" else -1):
            yield
    finally:
        torch.set_autocast_cache_enabled(cache)
