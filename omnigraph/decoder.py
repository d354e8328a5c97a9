"""A decoder with graphs: the plan's buckets captured once, each call routed to them or, for a named reason, to eager."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from threading import RLock
from types import TracebackType
from typing import Any, Literal

import torch

from omnigraph._fingerprint import Fingerprint
from omnigraph._joining import batched_chunked, chunked
from omnigraph._live import EAGER, Live, Way, allowed, replay
from omnigraph._pool import Pool, capturing, environment, pick_backend
from omnigraph._provenance import differences
from omnigraph._warmup import CaptureReport, Progress, capture_buckets, check_output, compile_module
from omnigraph.facts import DecoderFacts, code_space, probe
from omnigraph.packing import Call, packer
from omnigraph.shapes import Bucket, BucketPlan, Cost, Shape
from omnigraph.stats import Fallback, Outcome, ReplayStats
from omnigraph.streaming import StreamSession, push_many

Padding = Literal["auto", "exact", "allow"]
_REBUILD_ABOVE = 0.1  # a reconfigure that gives up this share of the pool recaptures the rest to return the memory


def _plan(plan: object) -> BucketPlan:
    if not isinstance(plan, BucketPlan):
        raise TypeError(f"plan must be a BucketPlan, got {type(plan).__name__}: make one with BucketPlan.grid(batch_sizes, sizes)")
    return plan


class GraphedDecoder:
    """A neural decoder, codes `[B, Q, F]` int64 to audio `[B, C, samples]`, served by captured graphs where that is right.

    Args:
        module: the decoder. Put into eval mode at warm-up.
        plan: the buckets to capture.
        num_quantizers, codebook_size: read off `module` or `module.config` where left out.
        padding: "auto" pads when the probe finds the decoder causal; "exact" never pads; "allow" insists: warm-up raises where
            padding would give wrong samples.
        backend: "auto" (the module's device), "cuda", "cpu", or "eager" (no graphs at all).
        cost: milliseconds of a call, `profile.cost` for instance; without it routes go by batch x frames.
        check_codes: check that codes are within the codebook. On by default on a CPU; on CUDA it costs a synchronisation.
        check_stale: before each replay, check that the module and torch's global switches are what they were at the capture (tens of
            microseconds). Turn it off only where nobody can change them.
        enabled: False sends every call eager.
        latency: time each call (on CUDA that synchronises it) into `stats`.

    Raises:
        ValueError: an argument is not one of the above, or nobody says how many quantizers or codes there are.
        TypeError: the plan is none.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        plan: BucketPlan,
        *,
        num_quantizers: int | None = None,
        codebook_size: int | None = None,
        padding: Padding = "auto",
        backend: str = "auto",
        cost: Cost | None = None,
        check_codes: bool | None = None,
        check_stale: bool = True,
        enabled: bool = True,
        latency: bool = False,
    ) -> None:
        if padding not in ("auto", "exact", "allow"):
            raise ValueError(f"padding is 'auto', 'exact' or 'allow', not {padding!r}")
        if backend not in ("auto", "cuda", "cpu", "eager"):
            raise ValueError(f"backend is 'auto', 'cuda', 'cpu' or 'eager', not {backend!r}")
        self.module, self.plan, self.padding, self.cost = module, _plan(plan), padding, cost
        self.num_quantizers, self.codebook_size = code_space(module, num_quantizers=num_quantizers, codebook_size=codebook_size)
        self.backend, self.enabled, self.check_stale, self.latency = backend, enabled, check_stale, latency
        self.check_codes = check_codes
        self.stats = ReplayStats()
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
        for difference in differences(dict(self.plan.made_for), self.module):
            warnings.warn(f"the plan was made for {difference}", stacklevel=3)
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

    def _capture(self, live: Live, buckets: tuple[Bucket, ...], progress: Progress | None) -> list[Any]:
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

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """What `module(codes)` returns, by replays where a captured bucket serves the call.

        Args:
            codes: `[B, Q, F]` int64 on the module's device.

        Returns:
            audio `[B, C, samples]`, the caller's own, without gradient.

        Raises:
            ValueError, TypeError: the codes are not of that form; nothing has been done then.
        """
        shape = self.check(codes)
        start = time.perf_counter() if self.latency else 0.0
        audio, served = self._serve(codes, shape)
        milliseconds = None
        if self.latency:
            if codes.device.type == "cuda":
                torch.cuda.synchronize(codes.device)
            milliseconds = (time.perf_counter() - start) * 1e3
        self.stats.record(Shape(*shape), served, milliseconds)
        return audio

    def _serve(self, codes: torch.Tensor, shape: tuple[int, int]) -> tuple[torch.Tensor, Outcome]:
        """The audio of a checked call, and how it was made; not counted."""
        while True:
            live = self._live
            reason = self._reason(live, codes.device)
            if reason is not None or live is None:
                facts = None if reason is Fallback.MODULE_CHANGED or live is None else live.facts
                return self._eager(codes, shape, facts), EAGER[reason or Fallback.NOT_WARMED_UP]
            way = self._way(live, shape)
            if way is None:
                continue
            served, pieces = way
            if not pieces:
                return self._eager(codes, shape, live.facts), served
            with live.pool:
                if not live.retired:  # not replaced while this call waited for its turn
                    return replay(pieces, codes), served

    @torch.no_grad()
    def _eager(self, codes: torch.Tensor, shape: tuple[int, int], facts: DecoderFacts | None) -> torch.Tensor:
        return check_output(self.module(codes), Shape(*shape), facts)

    def served(self, shape: Shape) -> Outcome:
        """How a call of `shape` would be served now; nothing is decoded or counted."""
        while True:
            live = self._live
            reason = self._reason(live, self.device)
            if reason is not None or live is None:
                return EAGER[reason or Fallback.NOT_WARMED_UP]
            if (way := self._way(live, shape)) is not None:
                return way[0]

    def _reason(self, live: Live | None, device: torch.device) -> Fallback | None:
        """Why no graph may serve a call on `device` now, whatever its shape."""
        if not self.enabled or self.backend == "eager":
            return Fallback.DISABLED
        return Fallback.NOT_WARMED_UP if live is None else live.reason(device, self.check_stale)

    def _way(self, live: Live, shape: tuple[int, int]) -> Way | None:
        return live.ways.get(shape) or live.way(Shape(*shape), self.cost, self.padding != "exact")

    def check(self, codes: torch.Tensor, *, empty: bool = False, values: bool = True) -> tuple[int, int]:
        """`(batch, frames)` of codes that can be decoded.

        Args:
            empty: no frames are fine.
            values: check that the codes are within the codebook, where `check_codes` says so.

        Raises:
            ValueError, TypeError: the codes are not `[B, Q, F]` int64 on the module's device, or out of range.
        """
        live = self._live
        try:
            (batch, quantizers, frames), device = codes.shape, codes.device
        except (AttributeError, ValueError):
            raise self._refusal(codes) from None
        if quantizers != self.num_quantizers or not batch or codes.dtype is not torch.int64 or self._closed or not (frames or empty):
            raise self._refusal(codes)
        if (live is None or device != live.pool.device) and device != self.device:
            raise self._refusal(codes)
        checked = self.check_codes or (self.check_codes is None and device.type == "cpu" and not capturing(device))
        if checked and values and frames:
            low, high = (int(value) for value in codes.aminmax())
            if low < 0 or high >= self.codebook_size:
                raise ValueError(f"codes go from 0 to {self.codebook_size - 1}; got {low} to {high}")
        return batch, frames

    def _refusal(self, codes: object) -> Exception:
        """What is wrong with these codes: what was expected, what came, what to do."""
        self._check_open()
        expected = f"expected codes [batch, {self.num_quantizers}, frames], int64, on {self.device}"
        if not isinstance(codes, torch.Tensor):
            return TypeError(f"{expected}; got {type(codes).__name__}")
        if codes.dim() != 3 or codes.shape[1] != self.num_quantizers:
            return ValueError(f"{expected}; got the shape {tuple(codes.shape)}")
        if not codes.numel():
            return ValueError(f"{expected}, at least one row and one frame; got the shape {tuple(codes.shape)}")
        if codes.dtype != torch.int64:
            return TypeError(f"{expected}; got {codes.dtype}: convert with .long()")
        return ValueError(f"{expected}; got codes on {codes.device}: move them with .to({str(self.device)!r})")

    def pack(self, lengths: Sequence[int], max_batch_size: int | None = None) -> list[Call]:
        """Group windows of `lengths` frames into the calls that cost least with what is captured now; see `packing.pack`."""
        live = self._live
        if live is None or self._reason(live, self.device) is not None:
            return packer((), self.cost, **allowed(self.facts, self.padding != "exact"))(lengths, max_batch_size)
        if live.packer is None:
            live.packer = packer(live.graphs, self.cost, **allowed(live.facts, self.padding != "exact"))
        return live.packer(lengths, max_batch_size)

    def chunked_decode(
        self, codes: torch.Tensor, chunk_size: int = 300, left_context_size: int = 25, *, ramp: Sequence[int] = ()
    ) -> torch.Tensor:
        """Decode codes `[B, Q, F]` in chunks with left context, joined without a seam: audio `[B, C, samples]`.

        The length is a full decode's to the sample. Where the left context covers the receptive field, so are the samples.

        Args:
            chunk_size, left_context_size: in frames; a later chunk decodes its context again and drops what comes of it.
            ramp: the sizes of the first chunks.

        Raises:
            ValueError, TypeError: the codes, or a context too short for the decoder's trim; nothing has been done then.
        """
        return chunked(self, codes, chunk_size=chunk_size, left_context_size=left_context_size, ramp=ramp)

    def batched_chunked_decode(
        self,
        codes: torch.Tensor,
        lengths: Sequence[int] | torch.Tensor,
        chunk_size: int = 300,
        left_context_size: int = 25,
        *,
        ramp: Sequence[int] = (),
        max_batch_size: int | None = None,
    ) -> list[torch.Tensor]:
        """Decode requests of different lengths in chunks, all chunks of all requests packed into the calls that cost least.

        Args:
            codes: `[B, Q, F]`, a request a row, padded to F with anything.
            lengths: frames of each request, 0 to F.
            max_batch_size: the most chunks one call decodes, eager calls included; None: the largest bucket's batch, at least 8.

        Returns:
            audio `[C, samples]` for each request, as long as a full decode of it.

        Raises:
            ValueError, TypeError: codes, lengths or sizes; nothing has been done then.
        """
        return batched_chunked(
            self, codes, lengths, chunk_size=chunk_size, left_context_size=left_context_size, ramp=ramp, max_batch_size=max_batch_size
        )

    def stream(self, *, chunk_size: int = 25, left_context_size: int = 25, ramp: Sequence[int] = ()) -> StreamSession:
        """Begin a stream: `push` codes as they come, and get the audio that has become final."""
        return StreamSession(self, chunk_size=chunk_size, left_context_size=left_context_size, ramp=ramp)

    def push_many(self, pushes: Sequence[tuple[StreamSession, torch.Tensor]]) -> list[torch.Tensor]:
        """Push codes to several streams of this decoder; what is due in all of them is decoded in packed calls."""
        return push_many(self, pushes)

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
                if sum(live.graphs[bucket].nbytes for bucket in dropped) > _REBUILD_ABOVE * held:
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
                self.plan = before
                raise

    def recapture(self, *, progress: Progress | None = None) -> CaptureReport:
        """Probe and capture everything again: for a module that was changed on purpose."""
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

    def __enter__(self) -> GraphedDecoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.captured)} of {len(self.plan)} buckets captured"
        return f"<GraphedDecoder of {type(self.module).__name__}: {state}>"
