"""Are replays what eager gives? Bitwise where that must hold, else by the error of both against a reference of higher precision."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from omnigraph._html import table
from omnigraph._needs import need
from omnigraph.decoder import GraphedDecoder
from omnigraph.shapes import Shape
from omnigraph.stats import Outcome

if TYPE_CHECKING:
    import pandas as pd

DRAWN = 64  # frames, more than which an error is taken over
SLACK = 1.1  # a result that is not bitwise eager's may have this many times eager's own error, plus one unit in the last place


@dataclass(frozen=True)
class Compared:
    """One call: how it was served and how far it is from eager and from the reference.

    `error` and `eager_error` are relative: the norm of the difference to the reference over the norm of the reference. `snr_db`
    compares with eager: infinite where bitwise equal.
    """

    shape: Shape
    outcome: Outcome
    bitwise: bool
    error: float
    eager_error: float
    snr_db: float
    peak: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem


@dataclass(frozen=True)
class Comparison:
    """What `verify` found, a row for each call."""

    rows: tuple[Compared, ...]
    dtype: str
    device: str

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def to_frame(self) -> pd.DataFrame:
        """Columns: shape, batch, frames, kind, compiled, bucket, bitwise, error, eager_error, ratio, snr_db, peak, ok, problem."""
        rows = [
            {
                "shape": str(row.shape),
                "batch": row.shape.batch,
                "frames": row.shape.frames,
                "kind": row.outcome.kind,
                "compiled": row.outcome.compiled,
                "bucket": " + ".join(map(str, row.outcome.buckets)) or str(row.outcome.reason),
                "bitwise": row.bitwise,
                "error": row.error,
                "eager_error": row.eager_error,
                "ratio": row.error / row.eager_error if row.eager_error else math.nan,
                "snr_db": row.snr_db,
                "peak": row.peak,
                "ok": row.ok,
                "problem": row.problem,
            }
            for row in self.rows
        ]
        frame: pd.DataFrame = need("pandas").DataFrame(rows)
        return frame

    def __str__(self) -> str:
        bitwise = sum(row.bitwise for row in self.rows)
        wrong = [f"  {row.shape}: {row.problem}" for row in self.rows if not row.ok]
        verdict = "all as eager" if self.ok else f"{len(wrong)} not as eager"
        unproven = len(self.rows) - self.replayed
        verdict += f", {bitwise} of them bitwise" + f"; {unproven} went eager, with no replay to check" * bool(unproven)
        return "\n".join([f"{len(self.rows)} calls in {self.dtype} on {self.device}: {verdict}", *wrong])

    @property
    def replayed(self) -> int:
        """Calls that a replay served; the others are eager compared with eager."""
        return sum(row.outcome.kind != "fallback" for row in self.rows)

    def _repr_html_(self) -> str:
        heads = ["call", "served", "by", "bitwise", "error", "eager's error", "SNR dB", "problem"]
        wrong_first = sorted(self.rows, key=lambda row: row.ok)
        rows = [
            [r.shape, r.outcome.kind, by or str(r.outcome.reason), r.bitwise, r.error, r.eager_error, r.snr_db, r.problem]
            for r, by in ((r, " + ".join(map(str, r.outcome.buckets))) for r in wrong_first)
        ]
        return table(str(self).partition("\n")[0], heads, rows)


@contextmanager
def _full_precision() -> Iterator[None]:
    """float32 as float32: no tf32 in convolutions and products."""
    operations = [(backend, operation) for backend in ("cuda", "mkldnn") for operation in ("matmul", "conv", "rnn")]
    kept = [torch._C._get_fp32_precision_getter(*operation) for operation in operations]  # knows of the old switches too
    try:
        for operation in operations:
            torch._C._set_fp32_precision_setter(*operation, "ieee")
        yield
    finally:
        for operation, precision in zip(operations, kept, strict=True):
            torch._C._set_fp32_precision_setter(*operation, precision)


class Reference:
    """A copy of a decoder in higher precision: float32 for a half-precision one, else float64."""

    def __init__(self, module: torch.nn.Module) -> None:
        first = next(module.parameters(), None)
        self.dtype = torch.float32 if first is not None and first.dtype in (torch.bfloat16, torch.float16) else torch.float64
        self.module = copy.deepcopy(module).to(self.dtype)

    @torch.no_grad()
    def __call__(self, codes: torch.Tensor) -> torch.Tensor:
        # Process-wide switches, under which other threads' calls go eager: not touched for float64, which has no such shortcuts.
        precise = _full_precision() if self.dtype == torch.float32 else nullcontext()
        with precise, torch.autocast(codes.device.type, enabled=False):
            audio: torch.Tensor = self.module(codes)
        return audio.double()


def relative_error(audio: torch.Tensor, reference: torch.Tensor) -> float:
    """The norm of the difference over the norm of the reference, in float64."""
    reference = reference.double()
    return float((audio.double() - reference).norm() / reference.norm())


def within_rule(error: float, eager_error: float, dtype: torch.dtype) -> bool:
    """May a result with `error` stand for eager's with `eager_error`? At most 1.1 times that, plus one unit in the last place."""
    return error <= SLACK * eager_error + torch.finfo(dtype).eps


def snr_db(audio: torch.Tensor, eager: torch.Tensor) -> float:
    """Signal to noise of `audio` against `eager`, in dB; infinite where they are equal."""
    noise, signal = float((audio.double() - eager.double()).norm()), float(eager.double().norm())
    return math.inf if noise == 0 else 20 * math.log10(max(signal, 1e-300) / noise)


def compare(audio: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor, shape: Shape, outcome: Outcome) -> Compared:
    """Judge one result by the design's rule: an exact plain replay and an eager call bitwise, anything else by its error."""
    if (audio.shape, audio.dtype, audio.device) != (eager.shape, eager.dtype, eager.device):
        problem = f"{tuple(audio.shape)} {audio.dtype} on {audio.device}, eager gives {tuple(eager.shape)} {eager.dtype} on {eager.device}"
        return Compared(shape, outcome, False, math.nan, math.nan, math.nan, math.nan, problem)
    bitwise = torch.equal(audio.contiguous().view(torch.uint8), eager.contiguous().view(torch.uint8))
    error, eager_error = relative_error(audio, reference), relative_error(eager, reference)
    must_be_bitwise = outcome.kind in ("exact", "fallback") and not outcome.compiled
    problem = ""
    if must_be_bitwise and not bitwise:
        problem = f"not bitwise equal: an error of {error:.3g} where eager has {eager_error:.3g}"
    elif not bitwise and not within_rule(error, eager_error, audio.dtype):  # a NaN is not within it either
        problem = f"an error of {error:.3g} is over {SLACK} times eager's {eager_error:.3g}"
    return Compared(shape, outcome, bitwise, error, eager_error, snr_db(audio, eager), float(eager.abs().max()), problem)


def _call(
    decoder: GraphedDecoder, shape: Shape, generator: torch.Generator, reference: Reference
) -> tuple[Outcome, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One call on random codes: how it was served, and its audio, eager's and the reference's."""
    size = (shape.batch, decoder.num_quantizers, shape.frames)
    codes = torch.randint(decoder.codebook_size, size, generator=generator, device="cpu").to(decoder.device)
    if decoder._live is not None:
        decoder._live.poison(decoder.codebook_size - 1)
    audio, outcome, _ = decoder._serve(codes, decoder.check(codes))
    return outcome, audio, decoder.module(codes), reference(codes)


@torch.no_grad()
def verify(decoder: GraphedDecoder, shapes: Iterable[Sequence[int]], *, seed: int = 0, reference: Reference | None = None) -> Comparison:
    """Decode fresh random codes of each shape through `decoder` and eager, and compare.

    The static buffers are poisoned before each call, so that a replay that writes nothing, or reads what it should not, is caught.
    The calls are not counted in `decoder.stats`. An error is taken over at least 64 frames: that of one short call is an accident.

    Args:
        shapes: `(batch, frames)` of the calls to compare.
        seed: of the random codes.
        reference: made from the decoder's module where left out; pass one to use it for several runs.

    Raises:
        ValueError: no shapes, or one that is not two positive integers.
    """
    reference = reference or Reference(decoder.module)
    generator = torch.Generator("cpu").manual_seed(seed)
    rows = []
    for shape in (Shape(*s) for s in shapes):
        outcome, audio, eager, exact = _call(decoder, shape, generator, reference)
        row = compare(audio, eager, exact, shape, outcome)
        if not row.bitwise and not math.isnan(row.error):
            more = [_call(decoder, shape, generator, reference)[1:] for _ in range(DRAWN // (shape.batch * shape.frames))]
            audio, eager, exact = (torch.cat(audios, -1) for audios in zip((audio, eager, exact), *more, strict=True))
            row = compare(audio, eager, exact, shape, outcome)
        rows.append(row)
    if not rows:
        raise ValueError("verify needs at least one (batch, frames): without a call there is nothing to compare")
    first = next(decoder.module.parameters(), None)
    return Comparison(tuple(rows), str(first.dtype if first is not None else None).removeprefix("torch."), str(decoder.device))
