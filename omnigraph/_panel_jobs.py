"""What a panel has done to a decoder: measure it, capture a plan and run calls through it, play a trace at its arrival times."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import torch

from omnigraph._needs import need
from omnigraph._owner import Padding as Policy
from omnigraph._warmup import CaptureReport, Progress
from omnigraph.chunks import schedule
from omnigraph.decoder import GraphedDecoder
from omnigraph.driving import Driven, drive
from omnigraph.profile import Profile
from omnigraph.shapes import BucketPlan, Calls, Shape
from omnigraph.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

SAMPLE = 40  # calls that are timed after a plan was captured
LENGTHS = 7  # measured for each batch size
KEPT = 20_000  # calls that a player remembers: the latest


class Cancelled(Exception):
    """Raised by work that the user stopped: nothing went wrong."""


@contextmanager
def own_grad_mode() -> Iterator[None]:
    """No gradients, and no inference mode, whatever the thread was in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@dataclass(frozen=True)
class Applied:
    """What came of a plan: the capture, and the calls then timed (None: stopped before they were)."""

    plan: BucketPlan
    report: CaptureReport
    driven: Driven | None
    problem: str = ""  # why there are no times


def apply(decoder: GraphedDecoder, plan: BucketPlan, padding: Policy, calls: Calls, progress: Progress) -> Applied:
    """Capture exactly `plan`, then time some of `calls`. Where `progress` raises, or the capture, the graphs of before stay in place."""
    before = decoder.padding
    decoder.padding = padding
    with own_grad_mode():
        try:
            report = decoder.reconfigure(plan, progress=progress)
        except BaseException:
            decoder.padding = before
            raise
        try:
            return Applied(plan, report, drive(decoder, calls, limit=SAMPLE, eager_repeats=3, progress=progress))
        except Cancelled:
            return Applied(plan, report, None, "timing calls was cancelled")
        except Exception as error:  # the plan is in place all the same
            return Applied(plan, report, None, f"timing calls failed: {type(error).__name__}: {error}")


def shapes_to_measure(calls: Calls, plan: BucketPlan | None) -> list[Shape]:
    """The plan's shapes and, of each batch size called, the shortest and the longest length and some between."""
    found = {bucket.shape for bucket in plan.buckets} if plan else set[Shape]()
    for batch in {shape.batch for shape in calls}:
        lengths = sorted(shape.frames for shape in calls if shape.batch == batch)
        steps = min(LENGTHS, len(lengths)) - 1
        found |= {Shape(batch, lengths[round(i * (len(lengths) - 1) / max(steps, 1))]) for i in range(steps + 1)}
    return sorted(found)


def measure(decoder: GraphedDecoder, calls: Calls, plan: BucketPlan | None, progress: Progress) -> Profile:
    """A profile of the decoder's module at the shapes that matter for `calls` and `plan`, quickly."""
    with own_grad_mode():
        shapes = shapes_to_measure(calls, plan)
        return Profile.measure(
            decoder.module,
            shapes,
            num_quantizers=decoder.num_quantizers,
            codebook_size=decoder.codebook_size,
            repeats=10,
            seconds_each=0.15,
            progress=progress,
            backend=decoder.backend.replace("eager", "auto"),
        )


class Player:
    """Decodes the chunks of a trace when they are due, on random codes, on a thread of its own, until the trace ends or `stop`.

    A chunk is due when a model that makes 25 frames a second has made it, all `speed` times as fast; one that is late is decoded at
    once, the others wait for it.

    Args:
        watched: called now and then while it plays, and at its end with the error that ended it, or None.
    """

    def __init__(
        self,
        decoder: GraphedDecoder,
        trace: Trace,
        *,
        chunk_size: int,
        left_context_size: int,
        ramp: tuple[int, ...] = (),
        speed: float = 1.0,
        watched: Callable[[BaseException | None], object] = lambda error: None,
    ) -> None:
        if not 0 < speed < math.inf:
            raise ValueError(f"speed is a positive factor on the trace's arrivals; got {speed}")
        self.decoder, self.trace, self.speed, self.watched = decoder, trace, speed, watched
        self.cut: dict[str, Any] = {"chunk_size": chunk_size, "left_context_size": left_context_size, "ramp": ramp, "upsample": 1}
        self.captures: list[tuple[float, int]] = []  # when other graphs were first seen, and how many they are
        self.rows: deque[tuple[Any, ...]] = deque(maxlen=KEPT)
        self._stopped, self._ended, self._graphs = Event(), Event(), object()
        self.thread = Thread(target=self._run, name="omnigraph-player", daemon=True)

    def start(self) -> Player:
        self.thread.start()
        return self

    def stop(self, timeout: float | None = 10.0) -> None:
        """Play no further call; waits for the one under way."""
        self._stopped.set()
        self.thread.join(timeout)

    @property
    def playing(self) -> bool:
        return self.thread.is_alive() and not self._ended.is_set()

    def chunks(self) -> list[tuple[float, int]]:
        """When each chunk is due, in seconds, and the frames that its call sees."""
        found = [
            ((arrival + chunk.last / 25) / self.speed, chunk.last - chunk.first)
            for arrival, frames in zip(self.trace.arrival.tolist(), self.trace.frames.tolist(), strict=True)
            for chunk in schedule(frames, **self.cut)
        ]
        first = min(due for due, _ in found)
        return sorted((due - first, frames) for due, frames in found)

    def _run(self) -> None:
        ended: BaseException | None = None
        try:
            with own_grad_mode():
                self._play()
        except BaseException as error:  # shown by who watches: nobody else would see it
            ended = error
        self._ended.set()
        self.watched(ended)

    def _play(self) -> None:
        began, told = time.perf_counter(), 0.0
        codes: dict[int, torch.Tensor] = {}
        for due, frames in self.chunks():
            if self._stopped.wait(max(due - (time.perf_counter() - began), 0.0)):
                return
            if frames not in codes:
                codes[frames] = self.decoder._codes(Shape(1, frames))
            self._call(codes[frames], frames, began)
            if time.perf_counter() - told > 0.5:
                told = time.perf_counter()
                self.watched(None)

    def _call(self, codes: torch.Tensor, frames: int, began: float) -> None:
        served, graphs, start = self.decoder.served(Shape(1, frames)), self.decoder.captured, time.perf_counter()
        if graphs != self._graphs:
            self._graphs = graphs
            self.captures.append((start - began, len(graphs)))
        self.decoder.decode(codes)
        if codes.device.type == "cuda":
            torch.cuda.current_stream(codes.device).synchronize()
        ms, buckets = (time.perf_counter() - start) * 1e3, " + ".join(map(str, served.buckets))
        row = (start - began, ms, 1, frames, served.kind, served.compiled, buckets, str(served.reason or ""))
        self.rows.append((*row, served.padding, len(self.captures) - 1))

    def to_frame(self) -> pd.DataFrame:
        """A row a call, as in `Served.to_frame("calls")`; `plan` counts the changes of graphs before it."""
        names = ["start", "ms", "batch", "frames", "kind", "compiled", "bucket", "reason", "padded_frames", "plan"]
        frame: pd.DataFrame = need("pandas").DataFrame(list(self.rows), columns=names)
        return frame

    def by_plan(self) -> pd.DataFrame:
        """A row for each set of graphs that calls met, in turn: graphs, since (seconds), calls, hit_rate, p50_ms, p95_ms, padded_frames."""
        frame, rows = self.to_frame(), []
        for plan, (since, graphs) in enumerate(self.captures):
            part = frame[frame["plan"] == plan]
            if not len(part):  # too long ago to be remembered
                continue
            row = {"graphs": graphs, "since": since, "calls": len(part), "hit_rate": float((part["kind"] != "fallback").mean())}
            rows.append(
                row | {f"p{q}_ms": float(part["ms"].quantile(q / 100)) for q in (50, 95)} | {"padded_frames": part["padded_frames"].sum()}
            )
        found: pd.DataFrame = need("pandas").DataFrame(
            rows, columns=["graphs", "since", "calls", "hit_rate", "p50_ms", "p95_ms", "padded_frames"]
        )
        return found
