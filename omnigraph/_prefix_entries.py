"""The entries of a decode-graph cache: which are kept, which go first, and which keys failed."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import torch

from omnigraph._pool import Pool
from omnigraph._prefix_entry import DecodeGraphKey, Entry
from omnigraph.graph import flush
from omnigraph.stats import Fallback

logger = logging.getLogger("omnigraph")
MAX_FAILED = 64  # keys remembered because their allocation or capture failed


class Entries:
    """Buffers and graphs by key, within limits in number and bytes, the least recently used first; beside them the keys that failed.

    Their graphs share a pool. One that holds many evicted graphs beside those in use gets no new ones, and dies with its last entry.
    """

    def __init__(self, max_entries: int, max_bytes: int | None) -> None:
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self.live: OrderedDict[DecodeGraphKey, Entry] = OrderedDict()
        self.failed: OrderedDict[DecodeGraphKey, Fallback] = OrderedDict()
        self._pool: Pool | None = None

    def pool(self, device: torch.device, backend: str) -> Pool:
        """The pool for a new entry."""
        if self._pool is None or self._pool.device != device or self._pool.closed > 2 * self.max_entries:
            self._pool = Pool(device, backend)
        return self._pool

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.live.values())

    def make_room(self, incoming: int = 0, keep: DecodeGraphKey | None = None) -> None:
        """Evict until `incoming` bytes more are within the limits: entries whose requests are gone before others, `keep` last.

        An entry that alone is over the limit goes too, and its key is marked.
        """
        while self.live and self._over(incoming):
            others = [key for key in self.live if key != keep]
            unowned = [key for key in others if not self.live[key].owners()]
            victim = next(iter(unowned or others or self.live))
            self.drop(victim)
            if victim == keep:
                self.mark(victim, Fallback.OVER_BUDGET, f"the entry takes more than {self.max_bytes:,} bytes")

    def _over(self, incoming: int) -> bool:
        too_many = len(self.live) + (1 if incoming else 0) > self.max_entries
        return too_many or (self.max_bytes is not None and self.nbytes + incoming > self.max_bytes)

    def drop(self, key: DecodeGraphKey) -> None:
        """Let go of an entry, once the device is done with it."""
        entry = self.live.pop(key)
        entry.pool.wait()
        if entry.graph is not None:
            entry.graph.close()
        for failed in [failed for failed, reason in self.failed.items() if reason is Fallback.ALLOCATION_FAILED]:
            del self.failed[failed]  # there is memory again: worth another try

    def mark(self, key: DecodeGraphKey, reason: Fallback, text: str) -> Fallback:
        """Remember that a key failed: its reason alone, no tensor."""
        self.failed[key] = reason
        while len(self.failed) > MAX_FAILED:
            self.failed.popitem(last=False)
        flush(key.device)
        logger.warning("no decode graph for %s: %s: %s", key, reason, text)
        return reason

    def clear(self) -> None:
        """Drop all entries and marks, and free the memory."""
        devices = {key.device for key in self.live}
        for key in [*self.live]:
            self.drop(key)
        self.failed.clear()
        for device in devices:
            flush(device)

    def records(self) -> list[dict[str, Any]]:
        """A row for each key, as `DecodeGraphCache.to_frame` shows it."""
        rows: list[tuple[DecodeGraphKey, Entry | None, str]] = []
        rows += [(key, entry, "captured" if entry.graph else "registered") for key, entry in self.live.items()]
        rows += [(key, None, str(reason)) for key, reason in self.failed.items()]
        return [
            {
                "branch": key.branch,
                "batch": key.batch,
                "prefix_tokens": key.prefix_tokens,
                "layout": str(key.layout),
                "dtype": str(key.dtype).removeprefix("torch."),
                "attention": key.attention,
                "state": state,
                "mib": entry.nbytes / 2**20 if entry else 0.0,
                "graph_mib": entry.graph.nbytes / 2**20 if entry and entry.graph else 0.0,
                "owners": len(entry.owners()) if entry else 0,
                "copies": entry.copies if entry else 0,
                "replays": entry.replays if entry else 0,
                "seconds": entry.seconds if entry else 0.0,
            }
            for key, entry, state in rows
        ]
