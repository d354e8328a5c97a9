"""Traces: the requests of a workload (when each arrives, how many frames it decodes) and the decoder calls they make."""

from __future__ import annotations

import math
import os
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnigraph._files import FileError, folder, write_text
from omnigraph._needs import need
from omnigraph._tables import Column, read_table
from omnigraph.shapes import Calls, Shape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

SCHEMA = "omnigraph.trace/1"
CALLS_SCHEMA = "omnigraph.calls/1"
MAX_FRAMES = 2**31 - 1  # of one request: what a 32-bit index holds, five years of speech
_BLOCK = 65536  # rows turned into text at a time


def _microseconds(text: str) -> int:
    moment = datetime.fromisoformat(text)
    return (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


_ARRIVAL = Column("arrival", "seconds, not negative", "d", float, 0, 1e300)
_BATCH, _FRAMES = (Column(name, f"a whole number from 1 to {MAX_FRAMES}", "q", int, 1, MAX_FRAMES) for name in ("batch", "frames"))
_COUNT = Column("count", "a whole number, at least 1", "q", int, 1, 2**62)
_TIMESTAMP = Column("TIMESTAMP", "a date and time in ISO 8601", "q", _microseconds, -math.inf, math.inf)
_TOKENS = Column("GeneratedTokens", "a whole number, not negative", "q", int, 0, MAX_FRAMES)


def _read(
    path: str | os.PathLike[str], schema: str, *formats: Sequence[Column], hint: str = ""
) -> tuple[dict[str, array[Any]], dict[str, str], str]:
    try:
        return read_table(path, schema, *formats, hint=hint)
    except IsADirectoryError as error:
        raise folder(path) from error


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """The requests of a workload in the order of arrival (sorted here; equal arrivals keep their order).

    Args:
        arrival: seconds from the trace's start, float64, one a request.
        frames: codec frames to decode, int64, one a request.
        name: a short one, for legends and tables.
        frame_rate: frames a second of audio.
        source: one line that says where the trace is from.

    Raises:
        ValueError: no requests, arrivals negative or not finite, frames out of range, a frame rate not positive.
    """

    arrival: npt.NDArray[np.float64]
    frames: npt.NDArray[np.int64]
    name: str = "trace"
    frame_rate: float = 12.5
    source: str = ""

    def __post_init__(self) -> None:
        np = need("numpy")
        arrival, frames = np.array(self.arrival, np.float64), np.array(self.frames)
        if arrival.ndim != 1 or arrival.shape != frames.shape or not arrival.size:
            raise ValueError(f"expected one arrival and one length a request, at least one; got {arrival.shape} and {frames.shape}")
        if not (np.isfinite(arrival).all() and arrival.min() >= 0):
            raise ValueError(f"arrivals are seconds from the trace's start, not negative; got {arrival.min()} to {arrival.max()}")
        if frames.dtype.kind not in "iu" or not 1 <= frames.min() <= frames.max() <= MAX_FRAMES:
            raise ValueError(f"frames are whole numbers from 1 to {MAX_FRAMES}; got {frames.min()} to {frames.max()}, {frames.dtype}")
        if not 0 < self.frame_rate < math.inf:
            raise ValueError(f"frame_rate is frames a second, positive; got {self.frame_rate}")
        if (arrival[1:] < arrival[:-1]).any():
            order = np.argsort(arrival, kind="stable")
            arrival, frames = arrival[order], frames[order]
        frames = frames.astype(np.int64, copy=False)
        arrival.flags.writeable = frames.flags.writeable = False
        settled = {"arrival": arrival, "frames": frames, "frame_rate": float(self.frame_rate), "source": " ".join(self.source.split())}
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, frame_rate: float | None = None, seconds_per_token: float = 0.3, at_once: bool = False
    ) -> Trace:
        """Read a CSV with the columns arrival (seconds) and frames, or one of the Azure LLM inference traces.

        Other columns are ignored, rows are sorted by arrival, and the trace bears the file's name. Azure's columns TIMESTAMP
        and GeneratedTokens (Patel et al., Splitwise, ISCA 2024) are read as speech: arrivals count from the first, and a
        request has `max(1, int(tokens * seconds_per_token * frame_rate))` frames.

        Args:
            path: the file.
            frame_rate: frames a second of audio, where the file does not say: 12.5 by default.
            seconds_per_token: seconds of speech a text token makes, for Azure's format.
            at_once: take a file without arrivals as well, as if all requests came at 0.

        Raises:
            FileError: no UTF-8, another schema or frame rate, a missing column, no rows, a value that is no number or out of
                range (with its line), other totals than the file says.
            ValueError: `seconds_per_token` is not positive.
        """
        np = need("numpy")
        if not 0 < seconds_per_token < math.inf:
            raise ValueError(f"seconds_per_token is positive; got {seconds_per_token}")
        formats = [(_ARRIVAL, _FRAMES), (_TIMESTAMP, _TOKENS), *([(_FRAMES,)] if at_once else [])]
        held, said, source = _read(path, SCHEMA, *formats, hint="at_once=True takes lengths without arrivals")
        try:
            rate = float(said.get("frame_rate", 12.5 if frame_rate is None else frame_rate))
            if frame_rate not in (None, rate):
                raise ValueError(f"expected {frame_rate} frames a second, found {rate}")
            if "TIMESTAMP" in held:
                moments, tokens = (np.frombuffer(column, np.int64) for column in held.values())
                arrival, frames = (moments - moments.min()) / 1e6, np.maximum(1, (tokens * seconds_per_token * rate).astype(np.int64))
                source = source or f"Azure LLM inference trace, {seconds_per_token:g} s of speech a token"
            else:
                frames = np.frombuffer(held["frames"], np.int64)
                arrival = np.frombuffer(held["arrival"]) if "arrival" in held else np.zeros(len(frames))
            return cls(arrival, frames, Path(path).stem, rate, source)
        except ValueError as error:
            raise FileError(f"{path}: {error}") from error

    @classmethod
    def synthesise(
        cls,
        *,
        requests: int = 2000,
        rate: float = 2.0,
        mean_frames: float = 150.0,
        sigma: float = 0.8,
        burstiness: float = 2.0,
        seed: int = 0,
        max_frames: int = 750,
        frame_rate: float = 12.5,
        name: str = "assistant",
    ) -> Trace:
        """An assistant's workload: requests in bursts, most replies short, a few long. The same seed gives the same trace.

        Gaps between arrivals are gamma-distributed with a given coefficient of variation, as in Li et al., AlpaServe, OSDI 2023;
        lengths are log-normal.

        Args:
            requests: how many.
            rate: requests a second, on average.
            mean_frames: of the lengths, before they are cut off at `max_frames`.
            sigma: standard deviation of the lengths' logarithm.
            burstiness: the gaps' standard deviation over their mean: 0 is regular, 1 a Poisson process, more is bursts.
            seed: 0 to 2**32 - 1.
            max_frames: longer requests are cut off here.
            frame_rate: frames a second of audio.
            name: of the trace.

        Raises:
            ValueError: an argument out of range.
        """
        np = need("numpy")
        for argument, value, least, most in (
            ("requests", requests, 1, MAX_FRAMES),
            ("rate", rate, 1e-9, 1e9),
            ("mean_frames", mean_frames, 1, MAX_FRAMES),
            ("max_frames", max_frames, 1, MAX_FRAMES),
            ("sigma", sigma, 0, 10),
            ("burstiness", burstiness, 0, 100),
        ):
            if not least <= value <= most:
                raise ValueError(f"{argument} is from {least} to {most}; got {value}")
        random = np.random.RandomState(seed)  # its numbers are the same in every version of numpy; those of Generator may change
        gaps = random.gamma(burstiness**-2, burstiness**2 / rate, requests) if burstiness > 1e-3 else np.full(requests, 1 / rate)
        lengths = random.lognormal(math.log(mean_frames) - sigma**2 / 2, sigma, requests)
        arrival = np.round(np.cumsum(gaps) - gaps[:1], 6)
        frames = np.clip(np.rint(lengths), 1, max_frames).astype(np.int64)
        source = f"Trace.synthesise({requests=}, {rate=}, {mean_frames=}, {sigma=}, {burstiness=}, {seed=}, {max_frames=}, {frame_rate=})"
        return cls(arrival, frames, name, frame_rate, source)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the trace as CSV (schema omnigraph.trace/1); `load` gives the same numbers back."""
        heading = f"# {SCHEMA} rows={len(self)} frames={self.frames.sum()} frame_rate={self.frame_rate!r}\n"
        lines = [heading, f"# {self.source}\n" if self.source else "", "arrival,frames\n"]
        for at in range(0, len(self), _BLOCK):
            block = zip(self.arrival[at : at + _BLOCK].tolist(), self.frames[at : at + _BLOCK].tolist(), strict=True)
            lines.append("".join(f"{moment!r},{count}\n" for moment, count in block))
        return write_text(path, "".join(lines))

    def scale(self, load: float) -> Trace:
        """The same requests, arriving `load` times as fast.

        Raises:
            ValueError: `load` is not positive.
        """
        if not 0 < load < math.inf:
            raise ValueError(f"load is a positive factor; got {load}")
        return replace(self, arrival=self.arrival / load, source=f"{self.source} (arrivals {load:g} times as fast)")

    def histogram(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The lengths in frames that occur, ascending, and how many requests have each."""
        lengths, counts = need("numpy").unique(self.frames, return_counts=True)
        return lengths, counts

    def calls(self, chunk_size: int, left_context_size: int, ramp: Sequence[int] = ()) -> dict[Shape, int]:
        """The decoder calls of all requests, each decoded alone in chunks, as a histogram of shapes.

        Chunks start at frame 0; `ramp` gives the sizes of the first ones, the rest have `chunk_size`. A call sees its chunk and
        up to `left_context_size` frames before it.

        >>> Trace([0.0, 0.1], [60, 25]).calls(chunk_size=25, left_context_size=25)
        {Shape(batch=1, frames=25): 2, Shape(batch=1, frames=35): 1, Shape(batch=1, frames=50): 1}

        Raises:
            ValueError: a chunk below 1 frame, or a negative context.
        """
        np = need("numpy")
        if min(chunk_size, *ramp, 1) < 1 or left_context_size < 0:
            raise ValueError(f"chunks have at least 1 frame, contexts 0; got {chunk_size=}, {left_context_size=}, ramp={list(ramp)}")
        lengths, counts = self.histogram()
        longest = int(lengths[-1])
        size, context, *first = (min(n, longest) for n in (chunk_size, left_context_size, *ramp))
        ramped = list(accumulate(first, initial=0))
        # The starts of the calls up to the first that sees its whole context: from there on all full calls are alike.
        settled = ramped[-1] + max(-(-(context - ramped[-1]) // size), 0) * size
        starts = np.array([*ramped[:-1], *range(ramped[-1], settled, size), settled])
        last = starts[np.searchsorted(starts, lengths) - 1]
        more = np.maximum(lengths - 1 - settled, 0) // size
        last += more * size
        longer = len(self) - np.append(0, np.cumsum(counts))[np.searchsorted(lengths, starts[1:], "right")]
        before = np.minimum(starts, context)
        seen = np.concatenate([np.minimum(last, context) + lengths - last, before[:-1] + np.diff(starts), [context + size]])
        times = np.concatenate([counts, longer, [(more * counts).sum()]])
        total = Counter[int]()
        for frames, count in zip(seen.tolist(), times.tolist(), strict=True):
            total[frames] += count
        return {Shape(1, frames): count for frames, count in sorted(total.items()) if count}

    def to_frame(self) -> pd.DataFrame:
        """The requests as a table: arrival (seconds), frames, seconds of audio."""
        columns = {"arrival": self.arrival, "frames": self.frames, "seconds": self.frames / self.frame_rate}
        frame: pd.DataFrame = need("pandas").DataFrame(columns)
        return frame

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival[-1] - self.arrival[0])

    def __len__(self) -> int:
        return len(self.frames)

    def __repr__(self) -> str:
        return f"Trace({self.name}: {len(self)} requests in {self.duration:.0f} s, {self.frames.min()} to {self.frames.max()} frames)"


def save_calls(path: str | os.PathLike[str], calls: Calls) -> Path:
    """Write a histogram of shapes as CSV (batch,frames,count; schema omnigraph.calls/1).

    Raises:
        ValueError: no calls, or a count below 1.
    """
    if not calls or min(calls.values()) < 1:
        raise ValueError(f"expected shapes, each called at least once; got {dict(list(calls.items())[:5])}")
    rows = [f"{batch},{frames},{count}\n" for (batch, frames), count in sorted(calls.items())]
    return write_text(path, f"# {CALLS_SCHEMA} rows={len(calls)} count={sum(calls.values())}\nbatch,frames,count\n{''.join(rows)}")


def load_calls(path: str | os.PathLike[str]) -> dict[Shape, int]:
    """Read a histogram of shapes: a CSV with the columns batch, frames and count. A shape listed twice counts twice.

    Raises:
        FileError: as `Trace.load`.
    """
    held, _, _ = _read(path, CALLS_SCHEMA, (_BATCH, _FRAMES, _COUNT))
    calls = Counter[Shape]()
    for batch, frames, count in zip(*held.values(), strict=True):
        calls[Shape(batch, frames)] += count
    return dict(sorted(calls.items()))
