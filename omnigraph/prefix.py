"""Decode graphs for diffusion transformers with a cached prefix: a captured denoising step for each layout, shared by requests in turn."""

from __future__ import annotations

import logging
import time
from collections import Counter
from threading import RLock
from traceback import clear_frames
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from omnigraph._fingerprint import Fingerprint, plain_tensors
from omnigraph._html import table
from omnigraph._needs import need
from omnigraph._pool import capturing, environment
from omnigraph._prefix_entries import Entries
from omnigraph._prefix_entry import DecodeAdapter, DecodeBuffers, DecodeGraphKey, Entry, Prefix
from omnigraph.graph import CapturedGraph, CaptureError, capture
from omnigraph.stats import Fallback, Outcome, ReplayStats

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["DecodeAdapter", "DecodeBuffers", "DecodeGraphCache", "DecodeGraphKey", "Prefix"]

logger = logging.getLogger("omnigraph")
Contention = Literal["refresh", "eager"]
_EAGER = {reason: Outcome("fallback", reason=reason) for reason in Fallback}


class DecodeGraphCache:
    """Captured denoising steps of one model, by layout. Requests own their prefixes; each graph owns a copy of the one it served last.

    A step is served by the graph of its key: branch, batch, prefix length, layout, dtype, device and attention backend. The first step
    of a key captures it. Everything else goes eager, for a reason that `stats` counts and the log tells once.

    Args:
        adapter: the model's side, a `DecodeAdapter`.
        max_entries: keys kept at a time; the least recently used goes first, and before it any whose requests are all gone.
        max_bytes: of the entries together, buffers and graphs.
        contention: of live requests on one key. "refresh" serves all, copying the prefix at each change of request; "eager" serves the
            one that registered first and sends others eager until it is gone.
        backend: "auto" (the model's device), "cuda" or "cpu".

    Raises:
        ValueError: an argument is not one of the above.
    """

    def __init__(
        self,
        adapter: DecodeAdapter,
        max_entries: int = 8,
        max_bytes: int | None = None,
        contention: Contention = "refresh",
        backend: str = "auto",
    ) -> None:
        if max_entries < 1 or (max_bytes is not None and max_bytes < 1):
            raise ValueError(f"max_entries and max_bytes are positive; got {max_entries=}, {max_bytes=}")
        if contention not in ("refresh", "eager") or backend not in ("auto", "cuda", "cpu"):
            raise ValueError(f"contention is 'refresh' or 'eager', backend 'auto', 'cuda' or 'cpu'; got {contention!r}, {backend!r}")
        self.adapter, self.contention, self.backend = adapter, contention, backend
        self.stats = ReplayStats()
        self.refused: Counter[Fallback] = Counter()  # registrations, by reason
        self.copies = 0  # of a prefix into buffers
        self._entries = Entries(max_entries, max_bytes)
        self._lock = RLock()
        self._told: set[Fallback] = set()
        self._device = torch.device("cpu")
        self._fingerprint: Fingerprint | None = None
        self._state: object = None
        self._obstacle: Fallback | None = None

    @property
    def keys(self) -> tuple[DecodeGraphKey, ...]:
        """The keys that have buffers, the least recently used first."""
        return tuple(self._entries.live)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, buffers and graphs."""
        return self._entries.nbytes

    def register_prefill(self, prefix: Prefix) -> Fallback | None:
        """Make ready for the decode steps of a request whose prefill is done. Returns why they will go eager, or None."""
        with self._lock:
            reason = self._against(prefix) or self._admit(prefix)
            if reason is not None:
                self.refused[reason] += 1
                self._tell(reason, f"the prefill of {prefix.branch!r} is not registered")
            return reason

    def try_decode(self, prefix: Prefix | None, hidden: Tensor, timestep: Tensor) -> Tensor | None:
        """One denoising step by replay, or None: then the caller goes eager, and `stats` has the reason.

        Args:
            prefix: the request's, registered after its prefill.
            hidden: `[batch, tokens, channels]`, the target tokens last.
            timestep: `[batch]`, as the model takes it.

        Returns:
            what the model makes of the target tokens `[batch, target tokens, channels]`, the caller's own, without gradient.

        Raises:
            ValueError: hidden or timestep do not fit the key; nothing has been done then.
        """
        with self._lock:
            key = "a branch without prefix" if prefix is None or not prefix.layers else prefix.key(hidden.dtype, self.adapter.attention())
            try:
                latents = self._serve(key, prefix, hidden, timestep)
            except BaseException as error:
                clear_frames(error.__traceback__)  # whoever keeps the error does not keep buffers and graphs
                raise
            if isinstance(latents, Fallback):
                self.stats.record(key, _EAGER[latents])
                self._tell(latents, f"a step of {key} goes eager")
                return None
            return latents

    def clear(self) -> None:
        """Drop all entries, their owners and all marks of failure, and free the memory."""
        with self._lock:
            self._entries.clear()
            self._fingerprint = None  # it holds the model's tensors

    def to_frame(self) -> pd.DataFrame:
        """One row for each key: its fields, then state, mib, graph_mib, owners, copies, replays, seconds.

        `mib` are the buffers and what the capture added to the shared pool (`graph_mib`); `seconds` the warm-up, compilation and capture.
        """
        with self._lock:
            records = self._entries.records()
        frame: pd.DataFrame = need("pandas").DataFrame(records)
        return frame

    def _against(self, prefix: Prefix | None) -> Fallback | None:
        """What forbids graphs now: for this request, where it is, or for any."""
        if torch.compiler.is_compiling():
            return Fallback.COMPILING
        if prefix is None or not prefix.layers:
            return Fallback.NO_PREFIX
        if prefix.padded:
            return Fallback.PADDED_TEXT
        if prefix.scales or prefix.dtype.itemsize == 1:
            return Fallback.QUANTIZED_PREFIX
        device = prefix.device
        if device.type not in ("cuda", "cpu") or self.backend not in ("auto", device.type):
            return Fallback.NOT_ON_DEVICE
        if capturing(device):
            return Fallback.OUTER_CAPTURE
        return self._standing() or (Fallback.NOT_ON_DEVICE if device != self._device else None)

    def _standing(self) -> Fallback | None:
        """What forbids graphs of this model. Looked up anew whenever the model changed; what was captured before is dropped then."""
        changed = "" if self._fingerprint is None else self._fingerprint.changed()
        if changed is None and self.adapter.state() == self._state:
            return self._obstacle
        dropped = len(self._entries.live)
        self.clear()
        self._obstacle = self.adapter.obstacle()
        self._fingerprint, self._state = Fingerprint(self.adapter.module), self.adapter.state()
        first = next(self.adapter.module.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        self._device = device
        if dropped:
            logger.warning("%d decode graph entries dropped: %s", dropped, changed or "the model is set up otherwise")
        return self._obstacle or (Fallback.MODULE_CHANGED if dropped else None)

    def _disputed(self, entry: Entry, prefix: Prefix) -> Fallback | None:
        """Under contention="eager": is another live request the owner? One that is gone leaves its place to the next."""
        if self.contention == "eager":
            owners = entry.owners()
            if owners and owners[0] is not prefix.layers[0][0]:
                return Fallback.OWNED
            entry.own(prefix)
        return None

    def _admit(self, prefix: Prefix) -> Fallback | None:
        """Find or make the entry of a registering request."""
        key, entries, failed = prefix.key(prefix.dtype, self.adapter.attention()), self._entries, ""
        entry = entries.live.get(key)
        if key in entries.failed:
            return entries.failed[key]
        if entry is not None and (reason := self._disputed(entry, prefix)):
            return reason
        if entry is None:
            limit = entries.max_bytes
            if limit is not None and prefix.nbytes > limit:
                return entries.mark(key, Fallback.OVER_BUDGET, f"its prefix alone takes {prefix.nbytes:,} bytes of {limit:,}")
            entries.make_room(prefix.nbytes)
            pool = entries.pool(self._device, self.backend)
            try:
                with pool.lock, pool:  # so that whoever decodes first, on whatever stream, waits for the zeros
                    entry = Entry(self.adapter.buffers(key, prefix), self.adapter.compiled, pool)
            except (RuntimeError, MemoryError) as error:
                failed = f"{type(error).__name__}: {error}"
            if entry is None:  # out here the caught error and the tensors of its frames are gone
                return entries.mark(key, Fallback.ALLOCATION_FAILED, failed)
            entries.live[key] = entry
        entry.own(prefix)
        entry.forget(prefix)
        entries.live.move_to_end(key)
        return None

    def _serve(self, key: DecodeGraphKey | str, prefix: Prefix | None, hidden: Tensor, timestep: Tensor) -> Tensor | Fallback:
        reason = self._against(prefix)
        if reason is not None or prefix is None or isinstance(key, str):
            return reason or Fallback.NO_PREFIX
        entry = self._entries.live.get(key)
        if entry is None:
            return self._entries.failed.get(key, Fallback.UNKNOWN_KEY)
        if entry.graph is not None and environment(self._device) != entry.environment:
            return Fallback.ENVIRONMENT_CHANGED
        if reason := self._disputed(entry, prefix):
            return reason
        tokens = _fit(entry.buffers, hidden, timestep)
        self._entries.live.move_to_end(key)
        with entry.pool.lock, entry.pool, torch.no_grad():
            entry.buffers.hidden.copy_(hidden[:, -tokens:])
            entry.buffers.timestep.copy_(timestep)
            if not entry.holds(prefix):
                entry.refresh(prefix)
                self.copies += 1
            captured = entry.graph is not None
            graph = entry.graph or self._capture(entry)
            if not isinstance(graph, str):
                graph.launch()
                latents: Tensor = graph.outputs.clone()
        if isinstance(graph, str):  # the turn is over: nothing still reads the buffers
            self._entries.drop(key)
            return self._entries.mark(key, Fallback.CAPTURE_FAILED, graph)
        entry.replays += 1
        self.stats.record(key, entry.served)
        if not captured:
            self._entries.make_room(keep=key)
        return latents

    def _capture(self, entry: Entry) -> CapturedGraph | str:
        """Capture the step on an entry's buffers, or say what went wrong."""
        start, entry.environment = time.perf_counter(), environment(self._device)
        try:
            graph = capture(self.adapter.step, entry.buffers, pool=entry.pool, warmup=2, compiled=self.adapter.compiled, copy_inputs=False)
        except CaptureError as error:
            return str(error)
        graph.keeps = plain_tensors(self.adapter.module)
        entry.graph, entry.seconds = graph, time.perf_counter() - start
        return graph

    def _tell(self, reason: Fallback, what: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("%s: %s (told once; counted always)", what, reason)

    def __repr__(self) -> str:
        entries = self._entries.live.values()
        captured = sum(entry.graph is not None for entry in entries)
        return f"<DecodeGraphCache: {len(entries)} entries, {captured} captured, {self.nbytes:,} bytes; {self.stats}>"

    def _repr_html_(self) -> str:
        with self._lock:
            records = self._entries.records()
        return table(repr(self)[1:-1], list(records[0]) if records else [], [list(row.values()) for row in records])


def _fit(buffers: DecodeBuffers, hidden: Tensor, timestep: Tensor) -> int:
    """The number of target tokens, once hidden and timestep are known to fit the buffers without broadcasting."""
    there, device = buffers.hidden, buffers.hidden.device
    batch, tokens, channels = there.shape
    if hidden.shape != there.shape and not (hidden.dim() == 3 and hidden.shape[::2] == (batch, channels) and hidden.shape[1] > tokens):
        raise ValueError(f"expected hidden [{batch}, {tokens} or more, {channels}] on {device}; got {list(hidden.shape)}")
    if timestep.shape != buffers.timestep.shape:
        raise ValueError(f"expected timestep [{batch}] on {device}; got {list(timestep.shape)}")
    if hidden.device != device or timestep.device != device:
        raise ValueError(f"expected hidden and timestep on {device}; got {hidden.device} and {timestep.device}: move them first")
    return tokens
