"""Traces: chunk arithmetic against a loop, files and their errors, the shipped traces and how they were made."""

from __future__ import annotations

import ast
import csv
import math
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnigraph._files import FileError
from omnigraph.shapes import Shape
from omnigraph.trace import MAX_FRAMES, Trace, load_calls, save_calls

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "data" / "traces"
AZURE = ROOT.parent / "shared" / "data" / "AzureLLMInferenceTrace_conv.csv"

lengths = st.lists(st.integers(1, 400), min_size=1, max_size=30)
times = st.floats(0, 1e6, allow_subnormal=False)
requests = st.lists(st.tuples(times, st.integers(1, MAX_FRAMES)), min_size=1, max_size=30)
histograms = st.dictionaries(
    st.builds(Shape, st.integers(1, 64), st.integers(1, 4000)), st.integers(1, 10**12), min_size=1, max_size=20
)


def trace_of(frames: list[int]) -> Trace:
    return Trace(np.zeros(len(frames)), np.array(frames))


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "log.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def cut(frames: int, chunk_size: int, left_context_size: int, ramp: list[int]) -> list[tuple[int, int]]:
    """(context, own frames) of each call, one after the other."""
    calls, start, sizes = [], 0, iter(ramp)
    while start < frames:
        own = min(next(sizes, chunk_size), frames - start)
        calls.append((min(start, left_context_size), own))
        start += own
    return calls


@given(lengths, st.integers(1, 90), st.integers(0, 450), st.lists(st.integers(1, 60), max_size=5))
def test_calls_equal_a_loop_over_the_chunks(frames: list[int], size: int, context: int, ramp: list[int]) -> None:
    loop = [call for n in frames for call in cut(n, size, context, ramp)]
    assert sum(own for _, own in loop) == sum(frames)
    calls = trace_of(frames).calls(size, context, ramp)
    assert calls == Counter(Shape(1, seen + own) for seen, own in loop)
    assert list(calls) == sorted(calls)
    assert all(type(n) is int for shape, count in calls.items() for n in (*shape, count))


@given(lengths, st.integers(1, 90), st.lists(st.integers(1, 60), max_size=5))
def test_without_context_the_calls_tile_the_frames(frames: list[int], size: int, ramp: list[int]) -> None:
    calls = trace_of(frames).calls(size, 0, ramp)
    assert sum(shape.frames * count for shape, count in calls.items()) == sum(frames)


def test_calls_of_the_longest_request_and_the_largest_arguments() -> None:
    trace = trace_of([MAX_FRAMES, 10])
    assert trace.calls(25, 25) == {Shape(1, 10): 1, Shape(1, 25): 1, Shape(1, 47): 1, Shape(1, 50): MAX_FRAMES // 25 - 1}
    assert trace.calls(10**30, 10**30, ramp=[10**30]) == {Shape(1, 10): 1, Shape(1, MAX_FRAMES): 1}


@pytest.mark.parametrize(("chunk_size", "context", "ramp"), [(0, 25, ()), (-1, 25, ()), (25, -1, ()), (25, 25, (4, 0))])
def test_calls_refuse_sizes_out_of_range(chunk_size: int, context: int, ramp: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"at least 1 frame.*chunk_size={chunk_size}.*{context}"):
        trace_of([10]).calls(chunk_size, context, ramp)


def test_the_azure_trace_makes_the_known_numbers_of_calls_in_no_time() -> None:
    if not AZURE.exists():
        pytest.skip(f"needs the Azure LLM inference trace of 2023 as {'/'.join(AZURE.parts[-3:])} beside the project")
    trace = Trace.load(AZURE)
    assert (len(trace), trace.arrival[0], round(trace.duration)) == (19366, 0.0, 3502)
    rows = list(csv.DictReader(AZURE.open(encoding="utf-8")))
    assert sorted(trace.frames) == sorted(max(1, int(int(row["GeneratedTokens"]) * 0.3 * 12.5)) for row in rows)
    start = time.perf_counter()
    streamed, offline = trace.calls(25, 25), trace.calls(300, 25)
    assert time.perf_counter() - start < 1
    assert (sum(streamed.values()), sum(offline.values())) == (622718, 61076)


def test_azure_format(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:47.0000000,4,0\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48+00:00,3,109\n",
    )
    trace = Trace.load(path)
    assert trace.frames.tolist() == [165, 1, 408]
    assert trace.arrival.tolist() == [0, 0.31941, 1.31941]
    assert "0.3 s" in trace.source
    assert Trace.load(path, frame_rate=25, seconds_per_token=0.1).frames.tolist() == [110, 1, 272]
    with pytest.raises(ValueError, match="seconds_per_token is positive; got -1"):
        Trace.load(path, seconds_per_token=-1)


@given(requests, st.floats(0.1, 1000), st.text(max_size=40))
def test_a_saved_trace_loads_the_same(rows: list[tuple[float, int]], rate: float, source: str) -> None:
    path = TMP / "round.csv"
    arrival, frames = (np.array(column) for column in zip(*rows, strict=True))
    trace = Trace(arrival, frames, "round", rate, source.replace("\ud800", ""))
    back = Trace.load(trace.save(path))
    assert np.array_equal(back.arrival, trace.arrival)
    assert np.array_equal(back.frames, trace.frames)
    assert (back.name, back.frame_rate, back.source) == (trace.name, trace.frame_rate, trace.source)
