"""What a decoder with graphs owns: its module, a plan and the graphs captured for it. Warm-up, reconfiguration, close."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from threading import RLock
from types import TracebackType
from typing import Any, Literal, Self

import torch

from omnigraph._fingerprint import Fingerprint
from omnigraph._live import Live
from omnigraph._pool import Pool, environment, pick_backend
from omnigraph._provenance import differences
from omnigraph._warmup import BucketReport, CaptureReport, Progress, capture_buckets, compile_module
from omnigraph.facts import DecoderFacts, probe
from omnigraph.shapes import Bucket, BucketPlan, Cost, Shape
from omnigraph.stats import Fallback

Padding = Literal["auto", "exact", "allow"]
_REBUILD_ABOVE = 0.1  # a reconfigure that gives up this share of the pool recaptures the rest to return the memory


def _plan(plan: object) -> BucketPlan:
    if not isinstance(plan, BucketPlan):
        raise TypeError(f"plan must be a BucketPlan, got {type(plan).__name__}: make one with BucketPlan.grid(batch_sizes, sizes)")
    return plan


class GraphOwner:
    """Captures a plan's buckets of a module and keeps them; `GraphedDecoder` decodes with them."""

    num_quantizers: int
    codebook_size: int
    cost: Cost | None

    def __init__(self, module: torch.nn.Module, plan: BucketPlan, padding: Padding, backend: str) -> None:
        self.module, self.plan, self.padding, self.backend = module, _plan(plan), padding, backend
        self._live: Live | None = None
        self._changing = RLock()  # warm-up, reconfiguration, close: one at a time
        self._facts: DecoderFacts | None = None
        self._closed = False
        self._compiled: Callable[..., Any] | None = None

    @property
    def device(self) -> torch.device:
        """Where the module is now."""
        first = next(chain(self.module.parameters(), self.module.buffers()), None)
        return torch.device("cpu") if first is None else first.device

    @property
    def facts(self) -> DecoderFacts:
        """What the probe found out about the module at warm-up, or finds out now where there was none."""
        if self._live is not None:
            return self._live.facts
        if self._facts is None:
            self._facts = self._probe()
        return self._facts

    def _probe(self) -> DecoderFacts:
        return probe(self.module, num_quantizers=self.num_quantizers, codebook_size=self.codebook_size, reach=0)

    @property
    def captured(self) -> tuple[Bucket, ...]:
        """The buckets that have a graph now, the largest first."""
        return tuple(self._live.graphs) if self._live is not None else ()

    @property
    def nbytes(self) -> int:
        """Bytes of the pool that the graphs share."""
        return self._live.pool.nbytes if self._live is not None else 0

    def warmup(self, *, strict: bool = False, progress: Progress | None = None) -> CaptureReport:
        """Probe the module and capture every bucket of the plan, the largest first.

        Args:
            strict: raise unless every bucket was captured as asked.
            progress: called with what is being done, how many steps are done and how many there are.

        Raises:
            RuntimeError: `strict`, and a bucket was not captured; the text lists them.
            ValueError: padding="allow" on a decoder that cannot be padded, or a backend that the device lacks.
        """
        with self._changing:
            self._check_open()
            if self._live is not None:
                return CaptureReport((), self._live.pool.backend, nbytes=self.nbytes, note="already warmed up: nothing was done")
            report = self._build(self.plan.buckets, progress)
        if strict and (report.failed or report.note):
            raise RuntimeError(f"warmup(strict=True): {report}")
        return report

    def _build(self, buckets: tuple[Bucket, ...], progress: Progress | None) -> CaptureReport:
        """Capture `buckets` into a new pool and put that in place of what is live."""
        start = time.perf_counter()
        if self.backend == "eager":
            return CaptureReport((), "eager", note="backend='eager': every call goes eager")
        pick_backend(self.backend, self.device)
        self.module.eval()
        measured = getattr(getattr(self.cost, "__self__", None), "made_for", {})  # of the profile whose `cost` it is
        for what, made_for in (("plan", self.plan.made_for), ("cost", measured)):
            for difference in differences(dict(made_for), self.module):
                warnings.warn(f"the {what} was made for {difference}", stacklevel=3)
        facts = self._facts = self._probe()
        probed = time.perf_counter() - start
        if self.padding == "allow" and not (facts.causal and facts.rows_independent):
            raise ValueError(
                "padding='allow', but the probe found that padding would change samples: the decoder looks ahead or mixes rows"
            )
        unsafe = "it keeps state between calls" if facts.stateful else "" if facts.deterministic else "the same input gives other outputs"
        live = Live(Pool(self.device, self.backend), {}, facts, unsafe, Fingerprint(self.module), environment(self.device))
        rows = [] if unsafe else self._capture(live, buckets, progress)
        old, self._live = self._live, live
        if old is not None:
            old.retire(keep=live)
        note = f"no graphs: {unsafe}, so a replay would not do what a call does" if unsafe else ""
        note = note or ("" if live.graphs else "no bucket was captured: every call goes eager")
        return CaptureReport(tuple(rows), live.pool.backend, time.perf_counter() - start - probed, probed, live.pool.nbytes, note=note)

    def _capture(self, live: Live, buckets: tuple[Bucket, ...], progress: Progress | None) -> list[BucketReport]:
        if self._compiled is None and any(bucket.compiled for bucket in buckets):  # the import alone takes seconds
            self._compiled = compile_module(self.module)
        graphs, rows = capture_buckets(
            self.module,
            buckets,
            codes=self._codes,
            facts=live.facts,
            pool=live.pool,
            compiled=self.module if self._compiled is None else self._compiled,
            progress=progress,
        )
        live.graphs = dict(sorted([*live.graphs.items(), *graphs.items()], key=lambda item: -item[0].shape.batch * item[0].shape.frames))
        return rows

    def _codes(self, shape: Shape) -> torch.Tensor:
        """Random codes for a warm-up; the caller's random state is left as it was."""
        generator = torch.Generator("cpu").manual_seed(shape.batch * 1_000_003 + shape.frames)
        size = (shape.batch, self.num_quantizers, shape.frames)
        with torch.inference_mode(False):
            return torch.randint(self.codebook_size, size, generator=generator, device="cpu").to(self.device)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this decoder is closed: make a new GraphedDecoder")

    def reconfigure(self, plan: BucketPlan, *, progress: Progress | None = None) -> CaptureReport:
        """Capture exactly `plan`: what is new is added; where enough memory would be given up, the rest moves to a fresh pool.

        Calls go on meanwhile, through the graphs of before. If this fails or is interrupted, these stay in place.
        """
        with self._changing:
            self._check_open()
            live = self._live
            self.plan, before = _plan(plan), self.plan
            try:
                if (
                    live is None
                    or live.unsafe
                    or live.reason(self.device, check_stale=True) in (Fallback.MODULE_CHANGED, Fallback.ENVIRONMENT_CHANGED)
                ):
                    return self._build(plan.buckets, progress)
                held = live.pool.nbytes
                dropped = [bucket for bucket in live.graphs if bucket not in plan.buckets]
                given_up = sum(live.graphs[bucket].nbytes for bucket in dropped)
                if given_up > _REBUILD_ABOVE * held or live.pool.closed > 2 * len(plan):  # a closed graph is held until its pool dies
                    report = self._build(plan.buckets, progress)
                    return replace(report, freed=max(held - report.nbytes, 0))
                start = time.perf_counter()
                kept = {bucket: graph for bucket, graph in live.graphs.items() if bucket not in dropped}
                fresh = replace(live, graphs=kept, ways={})
                rows = self._capture(fresh, tuple(b for b in plan.buckets if b not in kept), progress)
                self._live = fresh
                live.retire(keep=fresh)
                note = f"{len(kept)} kept, {len(dropped)} dropped; the pool keeps its memory until enough is given up"
                return CaptureReport(tuple(rows), live.pool.backend, time.perf_counter() - start, nbytes=live.pool.nbytes, note=note)
            except BaseException:
                if self._live is live:  # else the new graphs are in place, and what was left is to close the old ones
                    self.plan = before
                raise

    def recapture(self, *, progress: Progress | None = None) -> CaptureReport:
        """Probe and capture everything again: for a module that was changed on purpose.

        Also for a change that no check sees: a Python attribute, a number or a tensor, that `forward` reads. Until then calls of captured
        shapes give what the module gave at the capture, and others, which go eager, what it gives now.
        """
        with self._changing:
            self._check_open()
            self._compiled = None
            return self._build(self.plan.buckets, progress)

    def close(self) -> None:
        """Free the graphs and their memory now. A closed decoder refuses calls."""
        with self._changing:
            live, self._live, self._closed, self._compiled = self._live, None, True, None
            if live is not None:
                live.retire()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.captured)} of {len(self.plan)} buckets captured"
        return f"<GraphedDecoder of {type(self.module).__name__}: {state}>"
