"""Counting calls: what came, what served it, and why not."""

from __future__ import annotations

import csv
import logging
import math
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from omnigraph.shapes import Bucket, Shape, route
from omnigraph.stats import MAX_TIMES, Fallback, Outcome, ReplayStats, outcome

PLAIN, COMPILED, LARGE = Bucket(Shape(1, 8)), Bucket(Shape(1, 8), True), Bucket(Shape(4, 8))
EXACT = Outcome("exact", (PLAIN,))
PADDED = Outcome("padded", (COMPILED,), padding=3)
SPLIT = Outcome("split", (LARGE, PLAIN))
NONE = Outcome("fallback", reason=Fallback.NO_BUCKET)
OFF = Outcome("fallback", reason=Fallback.DISABLED)


@pytest.fixture
def stats() -> ReplayStats:
    stats = ReplayStats()
    for call, how, times in [
        (Shape(1, 8), EXACT, [1.0, 3.0, 2.0]),
        (Shape(1, 5), PADDED, [None, None]),
        (Shape(5, 8), SPLIT, [4.0]),
        (Shape(1, 9), NONE, [None, 7.0]),
        (Shape(1, 8), OFF, [None]),
        ("a key", NONE, [None]),
    ]:
        for ms in times:
            stats.record(call, how, ms)
    return stats


def test_totals(stats: ReplayStats) -> None:
    assert (stats.calls, stats.hits, stats.hit_rate) == (10, 6, 0.6)
    assert stats.fallbacks == {Fallback.NO_BUCKET: 3, Fallback.DISABLED: 1}
    assert stats.kinds == {"exact": 3, "padded": 2, "split": 1, "fallback": 4}
    assert (stats.compiled_hits, stats.padded_frames) == (2, 6)
    assert stats.to_calls() == {(1, 5): 2, (1, 8): 4, (1, 9): 2, (5, 8): 1}
    assert str(stats) == (
        "10 calls, hit rate 0.60: 3 exact, 2 padded, 1 split, 2 compiled; 4 eager (disabled 1, no_bucket 3); 6 frames of padding"
    )


def test_nothing_counted() -> None:
    stats = ReplayStats()
    assert (stats.calls, stats.hits, stats.hit_rate, stats.to_calls(), stats.fallbacks) == (0, 0, 0.0, {}, {})
    assert len(stats.to_frame()) == 0
    assert list(stats.to_frame().columns)[:2] == ["call", "batch"]


def test_the_frame_has_a_row_for_each_call_and_outcome(stats: ReplayStats) -> None:
    frame = stats.to_frame().set_index(["call", "kind"])
    assert len(frame) == 6
    exact, padded, split = frame.loc[("1x8", "exact")], frame.loc[("1x5", "padded")], frame.loc[("5x8", "split")]
    assert (exact.batch, exact.frames, exact.calls, exact.median_ms, exact.bucket, exact.reason) == (1, 8, 3, 2.0, "1x8", "")
    assert (padded.compiled, padded.padded_frames, padded.bucket) == (True, 6, "1x8 compiled")
    assert math.isnan(padded.median_ms)
    assert split.bucket == "4x8 + 1x8"
    none = frame.loc[("1x9", "fallback")]
    assert (none.reason, none.bucket, none.calls, none.median_ms) == ("no_bucket", "", 2, 7.0)
    key = frame.loc[("a key", "fallback")]
    assert math.isnan(key.batch)
    assert int(stats.to_frame()["calls"].sum()) == stats.calls


def test_a_frame_of_keys_alone() -> None:
    stats = ReplayStats()
    for key in ("b", "a"):
        stats.record(key, NONE)
    assert list(stats.to_frame()["call"]) == ["a", "b"]


def test_reset_forgets(stats: ReplayStats) -> None:
    before = stats.counts()
    stats.reset()
    assert (stats.calls, stats.counts(), stats.times()) == (0, {}, {})
    assert sum(before.values()) == 10  # a snapshot


def test_times_are_the_latest_and_bounded(stats: ReplayStats) -> None:
    for i in range(MAX_TIMES + 10):
        stats.record(Shape(1, 8), EXACT, float(i))
    times = stats.times()[Shape(1, 8), EXACT]
    assert (len(times), times[-1]) == (MAX_TIMES, MAX_TIMES + 9)
    times.clear()
    assert len(stats.times()[Shape(1, 8), EXACT]) == MAX_TIMES


def test_shape_counts_as_a_csv(stats: ReplayStats, tmp_path: Path) -> None:
    path = stats.save_calls(tmp_path / "calls.csv")
    rows = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert list(csv.reader(rows)) == [
        ["batch", "frames", "count"],
        ["1", "5", "2"],
        ["1", "8", "4"],
        ["1", "9", "2"],
        ["5", "8", "1"],
    ]


def test_lines_in_the_log_say_what_was_so_then(caplog: pytest.LogCaptureFixture) -> None:
    stats = ReplayStats(log_every=2)
    with caplog.at_level(logging.INFO, "omnigraph"):
        for _ in range(5):
            stats.record(Shape(1, 8), EXACT)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == ["2 calls", "4 calls"]


def test_routes_become_outcomes() -> None:
    captured = [PLAIN, LARGE]
    assert outcome(route(Shape(1, 8), captured)) == EXACT
    assert outcome(route(Shape(5, 7), captured)) == Outcome("split", (LARGE, PLAIN), padding=5)
    assert outcome(route(Shape(1, 6), captured)) == Outcome("padded", (PLAIN,), padding=2)
    assert outcome(route(Shape(1, 9), captured)) == NONE
    assert outcome(route(Shape(1, 1), captured)).reason == Fallback.TOO_MUCH_PADDING
    assert outcome(route(Shape(1, 8), captured, lambda shape, how: float(how != "eager"))).reason == Fallback.EAGER_IS_FASTER


def test_outcomes_are_values_in_other_processes_too() -> None:
    assert Outcome("exact", (PLAIN,)) == EXACT
    assert hash(Outcome("exact", (PLAIN,))) == hash(EXACT)
    assert len({EXACT, PADDED, SPLIT, NONE, OFF, Outcome("fallback", reason=Fallback.DISABLED)}) == 5
    program = (
        "import pickle, sys; from omnigraph.stats import *; from omnigraph.shapes import *; import torch\n"
        "sys.stdout.buffer.write(pickle.dumps(Outcome('fallback', reason=Fallback.DISABLED)))"
    )
    sent = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, cwd=Path(__file__).parents[1]).stdout
    assert pickle.loads(sent) in {OFF}  # noqa: S301 - our own; strings hash differently there


def test_threads_lose_no_call() -> None:
    stats = ReplayStats()

    def work() -> None:
        for _ in range(1000):
            stats.record(Shape(1, 8), EXACT, 1.0)
            _ = stats.hit_rate

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stats.counts() == {(Shape(1, 8), EXACT): 4000}
