"""What a simulated run shows: a record of every chunk, call and request, and the figures made of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from omnigraph._needs import need
from omnigraph.shapes import BucketPlan, Route, Shape
from omnigraph.stats import Fallback, Outcome, outcome

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]

DRIFT = 0.01  # seconds a second: a decoder that falls behind faster is saturated


@dataclass(frozen=True, eq=False)
class Served:
    """What `simulate` found. Events are in seconds on the trace's clock, the length of a call in milliseconds.

    An entry a chunk, by request and place in it: `request`, `frames` (with context), `due`, `call` (the one that decodes it).
    An entry a call, in order: `start`, `ms`, `taken` (its index in `routes`).
    An entry a request: `arrival`, `first_audio` (seconds from arrival to its first decoded audio), `stalls` (how often its
    playback waits for audio), `stalled` (for how many seconds in all).
    """

    plan: BucketPlan | None
    max_batch: int
    routes: tuple[Route, ...]
    request: Ints
    frames: Ints
    due: Floats
    call: Ints
    start: Floats
    ms: Floats
    taken: Ints
    arrival: Floats
    first_audio: Floats
    stalls: Ints
    stalled: Floats

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many calls took each of `routes`."""
        return tuple(need("numpy").bincount(self.taken, minlength=len(self.routes)).tolist())

    @property
    def calls(self) -> Counter[Shape]:
        """How often each shape was called, with the batch sizes that the queue made."""
        return Counter({taken.shape: n for taken, n in zip(self.routes, self.counts, strict=True)})

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """How each of `routes` serves a call."""
        disabled = Outcome("fallback", reason=Fallback.DISABLED)
        return tuple(disabled if self.plan is None else outcome(taken) for taken in self.routes)

    @property
    def ready(self) -> Floats:
        """When the audio of each chunk was decoded."""
        return (self.start + self.ms / 1e3)[self.call]

    @property
    def waiting(self) -> Floats:
        """Seconds that each chunk waited for its call to start."""
        return self.start[self.call] - self.due

    @property
    def busy(self) -> float:
        """Seconds that all calls take."""
        return float(self.ms.sum()) / 1e3

    @property
    def utilisation(self) -> float:
        """Share of the time from the first chunk due to the last one decoded in which the decoder works."""
        return self.busy / float(self.ready.max() - self.due.min())

    @property
    def saturated(self) -> bool:
        """Whether the queue has grown, and not shrunk again, by the time the last request arrives.

        That is where half of the chunks due in the last quarter of that time (from the first chunk due) wait longer than 1 % of
        it, so that the decoder fell behind by 10 ms each second, and longer than two of the longest calls, which is no queue.
        """
        np, last = need("numpy"), float(self.arrival.max())
        elapsed = last - float(self.due.min())
        late = self.waiting[(self.due > last - elapsed / 4) & (self.due <= last)]
        return bool(len(late) and np.median(late) > max(DRIFT * elapsed, 2 * self.ms.max() / 1e3))

    def quantile(self, q: float, of: Literal["first_audio", "waiting", "stalled", "ms"] = "first_audio") -> float:
        """The `q` quantile (0 to 1) of `first_audio`, `waiting`, `stalled` (seconds) or `ms` (milliseconds a call)."""
        return float(need("numpy").quantile(getattr(self, of), q))

    def summary(self) -> dict[str, float | int | bool]:
        """The run in figures: seconds unless the name says ms; rates, shares and utilisation from 0 to 1."""
        calls, outcomes = len(self.start), self.outcomes
        decoded = sum(n * (r.shape.batch * r.shape.frames + r.padding) for r, n in zip(self.routes, self.counts, strict=True))
        missed = sum(n for o, n in zip(outcomes, self.counts, strict=True) if o.kind == "fallback")
        return {
            "requests": len(self.arrival),
            "calls": calls,
            "mean_batch": len(self.due) / calls,
            "ms_per_call": float(self.ms.mean()),
            "hit_rate": 1 - missed / calls,
            "padded_share": 1 - int(self.frames.sum()) / decoded,
            **{f"first_audio_p{q}": self.quantile(q / 100) for q in (50, 95, 99)},
            **{f"waiting_p{q}": self.quantile(q / 100, "waiting") for q in (50, 95, 99)},
            "underruns": int((self.stalls > 0).sum()),
            "underrun_share": float((self.stalls > 0).mean()),
            "stalled_seconds": float(self.stalled.sum()),
            "utilisation": self.utilisation,
            "saturated": self.saturated,
        }

    def to_frame(self, of: Literal["requests", "calls", "chunks"] = "requests") -> pd.DataFrame:
        """One row for each request, call (enough for a timeline) or chunk; times as in `Served`."""
        np = need("numpy")
        if of == "requests":
            columns = {name: getattr(self, name) for name in ("arrival", "first_audio", "stalls", "stalled")}
        elif of == "chunks":
            columns = {name: getattr(self, name) for name in ("request", "frames", "due", "waiting", "ready", "call")}
        else:
            each = [
                (*r.shape, o.kind, o.compiled, " + ".join(map(str, o.buckets)), str(o.reason or ""), o.padding)
                for r, o in zip(self.routes, self.outcomes, strict=True)
            ]
            names = ("batch", "frames", "kind", "compiled", "bucket", "reason", "padded_frames")
            columns = {"start": self.start, "ms": self.ms}
            columns |= {name: np.array(values)[self.taken] for name, values in zip(names, zip(*each, strict=True), strict=True)}
        frame: pd.DataFrame = need("pandas").DataFrame(columns)
        return frame
