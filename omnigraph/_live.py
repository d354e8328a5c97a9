"""The graphs that a decoder has captured, what held when it captured them, and how they serve a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

import torch

from omnigraph._fingerprint import Fingerprint
from omnigraph._pool import Pool, environment
from omnigraph.facts import DecoderFacts
from omnigraph.graph import CapturedGraph, flush
from omnigraph.packing import Packer
from omnigraph.shapes import Bucket, Cost, Shape, route
from omnigraph.stats import Fallback, Outcome, ReplayStats, Tally, outcome

EAGER = {reason: Outcome("fallback", reason=reason) for reason in Fallback}


class Allowed(TypedDict):
    """What may be done to a call; the keywords of `route` and `packer`."""

    pad_frames: bool
    pad_batch: bool
    split: bool


def allowed(facts: DecoderFacts, pads: bool) -> Allowed:
    """A decoder that looks ahead cannot be padded, one that mixes rows neither padded nor split."""
    return {"pad_frames": pads and facts.causal, "pad_batch": pads and facts.rows_independent, "split": facts.rows_independent}


class Piece(NamedTuple):
    """One replay of a call: rows `first:last` go to `there`, a view of the static input; `audio` is what comes back of them."""

    graph: CapturedGraph
    there: torch.Tensor
    audio: torch.Tensor
    padded: bool
    first: int
    last: int


class Way(NamedTuple):
    """How calls of one shape are served: by replaying `pieces`, or eagerly where there are none. `tally` counts them."""

    outcome: Outcome
    pieces: tuple[Piece, ...]
    tally: Tally


@dataclass
class Live:
    """Captured graphs and what held at their capture. `unsafe` says why there may be none; `ways` are routes taken, by the codes' shape."""

    pool: Pool
    graphs: dict[Bucket, CapturedGraph]
    facts: DecoderFacts
    unsafe: str
    fingerprint: Fingerprint
    environment: tuple[object, ...]
    ways: dict[object, Way] = field(default_factory=dict)
    packer: Packer | None = field(default=None, init=False)
    retired: bool = False

    def reason(self, device: torch.device, check_stale: bool) -> Fallback | None:
        """Why no graph may serve a call on `device` now, whatever its shape."""
        if self.unsafe:
            return Fallback.UNSAFE_MODULE
        if torch.compiler.is_compiling():
            return Fallback.COMPILING
        if self.pool.capturing():
            return Fallback.OUTER_CAPTURE
        if device != self.pool.device:
            return Fallback.MODULE_CHANGED
        if check_stale:
            if environment(device) != self.environment:
                return Fallback.ENVIRONMENT_CHANGED
            if self.fingerprint.changed() is not None:
                return Fallback.MODULE_CHANGED
        return None

    def way(self, codes: tuple[int, int, int], cost: Cost | None, pads: bool, stats: ReplayStats) -> Way | None:
        """Route a shape that is seen for the first time, and remember the views that its replays need. None: other graphs are live."""
        facts, pieces, first, shape = self.facts, list[Piece](), 0, Shape(codes[0], codes[2])
        found = route(shape, self.graphs, cost, **allowed(facts, pads))
        served = outcome(found)
        if found.miss == "no_bucket" and pads and route(shape, self.graphs, cost).parts:
            served = EAGER[Fallback.PADDING_UNSAFE]
        with self.pool.lock, self.pool, torch.inference_mode(False):
            if self.retired:  # and its graphs closed
                return None
            for bucket, rows in found.parts:
                graph = self.graphs[bucket]
                there = graph.inputs[0][:rows, :, : shape.frames]
                audio = graph.outputs[:rows, :, : facts.samples(shape.frames)]
                pieces.append(Piece(graph, there, audio, there.shape != graph.inputs[0].shape, first, first + rows))
                first += rows
            return self.ways.setdefault(codes, Way(served, tuple(pieces), stats.tally(shape, served)))

    def poison(self, code: int) -> None:
        """Fill the static buffers with what no correct replay leaves there: for tests of the replays."""
        with self.pool.lock, self.pool, torch.no_grad():
            for graph in self.graphs.values():
                graph.inputs[0].fill_(code)
                graph.outputs.fill_(torch.nan)

    def retire(self, keep: Live | None = None) -> None:
        """Close the graphs that `keep` does not use, and hand the device what that frees."""
        with self.pool.lock:  # no call is in the middle of one
            self.retired = True
            self.ways.clear()
            for bucket, graph in self.graphs.items():
                if keep is None or keep.graphs.get(bucket) is not graph:
                    graph.close()
        flush(self.pool.device)


def replay(pieces: tuple[Piece, ...], codes: torch.Tensor) -> torch.Tensor:
    """Copy in, launch, copy out; within a turn of the pool. The result is the caller's own."""
    if len(pieces) == 1:
        graph, there, audio, padded, _, _ = pieces[0]
        if padded:
            graph.inputs[0].zero_()
        there.copy_(codes)
        graph.launch()
        return audio.clone()
    joined = pieces[0].audio.new_empty((codes.shape[0], *pieces[0].audio.shape[1:]))
    for graph, there, audio, padded, first, last in pieces:
        if padded:
            graph.inputs[0].zero_()
        there.copy_(codes[first:last])
        graph.launch()
        joined[first:last].copy_(audio)
    return joined
