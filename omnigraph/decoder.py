"""A decoder with graphs: the plan's buckets captured once, each call routed to them or, for a named reason, to eager."""

from __future__ import annotations

import time
from collections.abc import Sequence
from traceback import clear_frames

import torch

from omnigraph._joining import batched_chunked, chunked
from omnigraph._live import EAGER, Live, Way, allowed, replay
from omnigraph._owner import GraphOwner, Padding
from omnigraph._pool import capturing
from omnigraph._warmup import check_output
from omnigraph.facts import DecoderFacts, code_space
from omnigraph.packing import Call, packer
from omnigraph.shapes import BucketPlan, Cost, Shape
from omnigraph.stats import Fallback, Outcome, ReplayStats, Tally
from omnigraph.streaming import StreamSession, push_many


class GraphedDecoder(GraphOwner):
    """A neural decoder, codes `[B, Q, F]` int64 to audio `[B, C, samples]`, served by captured graphs where that is right.

    Args:
        module: the decoder. Put into eval mode at warm-up.
        plan: the buckets to capture.
        num_quantizers, codebook_size: read off `module` or `module.config` where left out.
        padding: "auto" pads when the probe finds the decoder causal; "exact" never pads; "allow" insists: warm-up raises where
            padding would give wrong samples.
        backend: "auto" (the module's device), "cuda", "cpu", or "eager" (no graphs at all).
        cost: milliseconds of a call, `profile.cost` for instance; without it routes go by batch x frames.
        check_codes: check that codes are within the codebook. On by default on a CPU; on CUDA it costs a synchronisation, and without it
            a code out of range reads a neighbouring quantizer's row where the module lays its codebooks side by side.
        check_stale: before each replay, check that the module and torch's global switches are what they were at the capture (tens of
            microseconds). Turn it off only where nobody can change them. Seen are weights, buffers, submodules, hooks, train mode,
            `forward` set on an instance, quantized layers and peft's adapters. Not seen: any other Python attribute, a number or a
            tensor (`module.gain = 0.5`), and methods replaced on a class. A graph keeps what it was captured with: `recapture` then.
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
        super().__init__(module, plan, padding, backend)
        self.num_quantizers, self.codebook_size = code_space(module, num_quantizers=num_quantizers, codebook_size=codebook_size)
        self.enabled, self.check_stale, self.latency, self.cost, self.check_codes = enabled, check_stale, latency, cost, check_codes
        self._stats = ReplayStats()

    @property
    def stats(self) -> ReplayStats:
        """What happened to each call since the last `stats.reset()`."""
        return self._stats

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """What `module(codes)` returns, by replays where a captured bucket serves the call.

        Args:
            codes: `[B, Q, F]` int64 on the module's device.

        Returns:
            audio `[B, C, samples]`, the caller's own, without gradient.

        Raises:
            ValueError, TypeError: the codes are not of that form; nothing has been done then.
        """
        live = self._live
        way = None if live is None else live.ways.get(getattr(codes, "shape", None))  # known there: the rank and the quantizers are right
        if live is not None and way is not None and way.pieces and self._is_plain(codes, live):
            try:
                with live.pool.lock:
                    if live.pool.in_order() and not live.retired:
                        audio = replay(way.pieces, codes)
                        way.tally.calls += 1  # under the pool's lock: no other path counts a hit of this shape without timing it
                        return audio
            except BaseException as error:
                clear_frames(error.__traceback__)
                live = way = None  # whoever keeps the error does not keep the graphs
                raise
        del live, way
        shape = self.check(codes)
        return self._decode(codes, shape)

    def _is_plain(self, codes: torch.Tensor, live: Live) -> bool:
        """Nothing to check, time or log for codes of a shape that was served before? A replay is all there is to do then."""
        return (
            codes.dtype is torch.int64
            and self.enabled
            and not (self.check_codes or self.latency or self._stats.log_every)
            and (self.check_codes is False or live.pool.backend == "cuda")
            and live.reason(codes.device, self.check_stale) is None
        )

    def _decode(self, codes: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """`decode` for a shape's first call, for what goes eager, and for what is timed or logged."""
        start = time.perf_counter() if self.latency else 0.0
        audio, served, tally = self._serve(codes, shape)
        milliseconds = None
        if self.latency:
            if codes.device.type == "cuda":
                torch.cuda.current_stream(codes.device).synchronize()  # the device's would break a capture of another thread
            milliseconds = (time.perf_counter() - start) * 1e3
        self._stats.count(tally or self._stats.tally(Shape(*shape), served), milliseconds)
        return audio

    def _serve(self, codes: torch.Tensor, shape: tuple[int, int]) -> tuple[torch.Tensor, Outcome, Tally | None]:
        """The audio of a checked call, how it was made, and what counts that, where it is at hand; not counted yet."""
        audio, served, tally, facts = self._replayed(codes, shape)
        return self._eager(codes, shape, facts) if audio is None else audio, served, tally

    def _replayed(
        self, codes: torch.Tensor, shape: tuple[int, int]
    ) -> tuple[torch.Tensor | None, Outcome, Tally | None, DecoderFacts | None]:
        """The audio by replays, or None where the call goes eager, then with what its output must agree with."""
        try:
            while True:
                live = self._live
                reason = self._reason(live, codes.device)
                if reason is not None or live is None:
                    facts = None if reason is Fallback.MODULE_CHANGED or live is None else live.facts
                    return None, EAGER[reason or Fallback.NOT_WARMED_UP], None, facts
                way = self._way(live, shape)
                if way is None:
                    continue
                if not way.pieces:
                    return None, way.outcome, way.tally, live.facts
                with live.pool.lock, live.pool:
                    if not live.retired:  # not replaced while this call waited for its turn
                        return replay(way.pieces, codes), way.outcome, way.tally, None
        except BaseException as error:
            clear_frames(error.__traceback__)
            live = way = None
            raise

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
                return way.outcome

    def _reason(self, live: Live | None, device: torch.device) -> Fallback | None:
        """Why no graph may serve a call on `device` now, whatever its shape."""
        if not self.enabled or self.backend == "eager":
            return Fallback.DISABLED
        return Fallback.NOT_WARMED_UP if live is None else live.reason(device, self.check_stale)

    def _way(self, live: Live, shape: tuple[int, int]) -> Way | None:
        key = shape[0], self.num_quantizers, shape[1]
        return live.ways.get(key) or live.way(key, self.cost, self.padding != "exact", self._stats)

    def check(self, codes: torch.Tensor, *, empty: bool = False, values: bool = True) -> tuple[int, int]:
        """`(batch, frames)` of codes that can be decoded.

        Args:
            empty: no frames are fine.
            values: check that the codes are within the codebook, where `check_codes` says so.

        Raises:
            ValueError, TypeError: the codes are not `[B, Q, F]` int64 on the module's device, or out of range.
        """
        live = self._live
        there = None if live is None else live.pool.device
        del live  # an error that is kept would keep it
        try:
            (batch, quantizers, frames), device = codes.shape, codes.device
        except (AttributeError, ValueError):
            raise self._refusal(codes) from None
        if quantizers != self.num_quantizers or not batch or codes.dtype is not torch.int64 or self._closed or not (frames or empty):
            raise self._refusal(codes)
        if device != there and device != self.device:
            raise self._refusal(codes)
        checked = self.check_codes or (self.check_codes is None and device.type == "cpu")
        if checked and values and frames and not capturing(device):  # a capture could not read them
            low, high = (int(value) for value in codes.aminmax())
            if low < 0 or high >= self.codebook_size:
                raise self._out_of_range(codes, low, high)
        return batch, frames

    def _out_of_range(self, codes: torch.Tensor, low: int, high: int) -> ValueError:
        row, quantizer, frame = torch.nonzero((codes < 0) | (codes >= self.codebook_size))[0].tolist()
        first = f"the first {int(codes[row, quantizer, frame])} in row {row}, quantizer {quantizer}, frame {frame}"
        return ValueError(f"codes go from 0 to {self.codebook_size - 1}; got {low} to {high}, {first}")

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
            live.packer = packer(tuple(live.graphs), self.cost, **allowed(live.facts, self.padding != "exact"))
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
