"""Traces: chunk arithmetic against a loop, files and their errors, the shipped traces and how they were made."""

from __future__ import annotations

import ast
import csv
import math
import re
import tempfile
import time
import tracemalloc
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
histograms = st.dictionaries(st.builds(Shape, st.integers(1, 64), st.integers(1, 4000)), st.integers(1, 10**12), min_size=1, max_size=20)


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
    with AZURE.open(encoding="utf-8") as file:
        assert sorted(trace.frames) == sorted(max(1, int(int(row["GeneratedTokens"]) * 0.3 * 12.5)) for row in csv.DictReader(file))
    start = time.perf_counter()
    streamed, offline = trace.calls(25, 25), trace.calls(300, 25)
    assert time.perf_counter() - start < 1
    assert (sum(streamed.values()), sum(offline.values())) == (622718, 61076)


def test_azure_format(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:47.0000000,4,0\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48+00:00,3,109\n",
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
    arrival, frames = (np.array(column) for column in zip(*rows, strict=True))
    trace = Trace(arrival, frames, "round", rate, source)
    with tempfile.TemporaryDirectory() as folder:
        back = Trace.load(trace.save(Path(folder) / "round.csv"))
    assert np.array_equal(back.arrival, trace.arrival)
    assert np.array_equal(back.frames, trace.frames)
    assert (back.name, back.frame_rate, back.source) == (trace.name, trace.frame_rate, trace.source)


@given(histograms)
def test_saved_calls_load_the_same(calls: dict[Shape, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        back = load_calls(save_calls(Path(folder) / "calls.csv", calls))
    assert back == calls
    assert list(back) == sorted(back)


def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = trace_of([5]).save(tmp_path / "a.csv")
    before = path.read_text()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trace_of([6]).save(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_log_from_elsewhere_loads(tmp_path: Path) -> None:
    """Excel's mark, its line ends, quotes, blank lines, other columns, no final line end; almost sorted."""
    path = written(tmp_path, '\ufeff# first\r\n# second\r\n\r\nid, frames ,"arrival"\r\n"a,b",12,0.5\r\n\r\nc,7,0.25\r\nd,8,0.5')
    trace = Trace.load(path)
    assert (trace.arrival.tolist(), trace.frames.tolist()) == ([0.25, 0.5, 0.5], [7, 12, 8])
    assert (trace.name, trace.frame_rate, trace.source, trace.duration, len(trace)) == ("log", 12.5, "first second", 0.25, 3)
    assert Trace.load(path, frame_rate=50).frame_rate == 50


def test_a_file_of_lengths_alone_loads_when_asked_to(tmp_path: Path) -> None:
    path = written(tmp_path, "id,seconds,frames\na,1.0,13\nb,2.0,25\n")
    with pytest.raises(FileError, match=r"expected a header with arrival,frames.*is missing in 'id,seconds,frames'; at_once=True takes"):
        Trace.load(path)
    trace = Trace.load(path, at_once=True)
    assert (trace.arrival.tolist(), trace.frames.tolist()) == ([0, 0], [13, 25])


TRACE_ERRORS = {
    "": "found an empty file",
    "\n\n": "found an empty file",
    "# only a comment\n": "found an empty file",
    "arrival,frames\n": "expected rows below the header, found none",
    "arrival,seconds\n0,1\n": "expected a header with arrival,frames or TIMESTAMP,GeneratedTokens; .* missing in 'arrival,seconds'",
    "0.0,12\n0.1,13\n": "a column is missing in '0.0,12'",
    "arrival,frames,frames\n0,1,2\n": "the header names frames more than once",
    "arrival;frames\n0;1\n": "a column is missing in 'arrival;frames'",
    "arrival,frames\n0,1\n1,-3\n": r"line 3: expected frames \(a whole number from 1 to 2147483647\), got '-3'",
    "arrival,frames\n0,0\n": "line 2: expected frames .*, got '0'",
    "arrival,frames\n0,2147483648\n": "line 2: expected frames .*, got '2147483648'",
    f"arrival,frames\n0,{'9' * 5000}\n": f"line 2: expected frames .*, got '{'9' * 80}'$",
    "# c\n\narrival,frames\n0,1\n\n0,many\n": "line 6: expected frames .*, got 'many'",
    "arrival,frames\n0,2.5\n": "line 2: expected frames .*, got '2.5'",
    "arrival,frames\n0,\n": "line 2: expected frames .*, got ''",
    "arrival,frames\nsoon,1\n": r"line 2: expected arrival \(seconds, not negative\), got 'soon'",
    "arrival,frames\n-0.5,1\n": "line 2: expected arrival .*, got '-0.5'",
    "arrival,frames\nnan,1\n": "line 2: expected arrival .*, got 'nan'",
    "arrival,frames\n1e999,1\n": "line 2: expected arrival .*, got '1e999'",
    "arrival,frames\n0,5,25\n": "line 2: expected 2 values, got '0,5,25'",
    "arrival,frames\n0,5\n0\n": "line 3: expected 2 values, got '0'",
    'arrival,frames,id\n0,5,"a\n0,6,b\n': "expected CSV; unexpected end of data",
    b"arrival,frames\n0,5\n\xff\xfe": "expected UTF-8 text, found the byte 0xff; save it as UTF-8",
    "arrival,frames\n0,5\n".encode("utf-16"): "expected UTF-8 text, found the byte 0xff; save it as UTF-8",
    "TIMESTAMP,GeneratedTokens\nnoon,5\n": r"line 2: expected TIMESTAMP \(a date and time in ISO 8601\), got 'noon'",
    "TIMESTAMP,GeneratedTokens\n2023-11-16,-5\n": r"line 2: expected GeneratedTokens .*, got '-5'",
    "# omnigraph.trace/2 rows=1\narrival,frames\n0,5\n": "expected the schema 'omnigraph.trace/1', found 'omnigraph.trace/2'",
    "# omnigraph.calls/1 rows=1 count=1\nbatch,frames,count\n1,5,1\n": "expected the schema .*, found 'omnigraph.calls/1'",
    "# omnigraph.trace/1 rows=1 frames=5 frame_rate=fast\narrival,frames\n0,5\n": "log.csv: .*'fast'",
    "# omnigraph.trace/1 rows=1 frames=5 frame_rate=-1\narrival,frames\n0,5\n": "frame_rate is frames a second, positive; got -1",
    "# omnigraph.trace/1 rows=2 frames=10\narrival,frames\n0,5\n": "holds {'rows': 1, 'frames': 5}, .* says {'rows': '2'.*cut short",
}


@pytest.mark.parametrize(("content", "says"), TRACE_ERRORS.items(), ids=range(len(TRACE_ERRORS)))
def test_a_bad_trace_file_gets_an_error_that_names_what_came(tmp_path: Path, content: str | bytes, says: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(FileError, match=says) as caught:
        Trace.load(path)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < len(str(path)) + 300


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "found an empty file"),
        ("batch,frames,count\n", "expected rows below the header"),
        ("batch,frames\n1,2\n", "expected a header with batch,frames,count; .* missing in 'batch,frames'"),
        ("batch,frames,count\n0,2,1\n", "line 2: expected batch .*, got '0'"),
        ("batch,frames,count\n1,2,0\n", r"line 2: expected count \(a whole number, at least 1\), got '0'"),
        ("batch,frames,count\n1,2,x\n", "line 2: expected count .*, got 'x'"),
        ("# omnigraph.calls/9\nbatch,frames,count\n1,2,3\n", "expected the schema 'omnigraph.calls/1', found 'omnigraph.calls/9'"),
    ],
)
def test_a_bad_file_of_calls_gets_an_error_that_names_what_came(tmp_path: Path, content: str, says: str) -> None:
    with pytest.raises(FileError, match=says):
        load_calls(written(tmp_path, content))


def test_calls_listed_twice_add_up_and_none_are_not_saved(tmp_path: Path) -> None:
    assert load_calls(written(tmp_path, "count,frames,batch\n2,50,1\n3,50,1\n")) == {Shape(1, 50): 5}
    for calls in ({}, {Shape(1, 50): 0}):
        with pytest.raises(ValueError, match="each called at least once"):
            save_calls(tmp_path / "none.csv", calls)


@given(st.data())
def test_a_file_cut_short_anywhere_is_noticed(data: st.DataObject) -> None:
    content = b"# omnigraph.trace/1 rows=3 frames=157 frame_rate=12.5\n# a source\narrival,frames\n0.0,12\n0.125,120\n7.5,25\n"
    at = data.draw(st.integers(0, len(content) - 2))
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), content)
        assert len(Trace.load(path)) == 3
        path.write_bytes(content[:at])
        with pytest.raises(FileError):
            Trace.load(path)


@given(st.binary(max_size=200), st.sampled_from([b"", b"arrival,frames\n", b"TIMESTAMP,GeneratedTokens\n", b"# omnigraph.trace/1 "]))
def test_whatever_a_file_holds_it_loads_or_is_a_file_error(content: bytes, head: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            trace = Trace.load(written(Path(folder), head + content))
        except FileError:
            return
    assert len(trace) > 0


def test_another_frame_rate_than_the_file_says_is_an_error(tmp_path: Path) -> None:
    path = trace_of([5]).save(tmp_path / "a.csv")
    assert Trace.load(path, frame_rate=12.5).frame_rate == 12.5
    with pytest.raises(FileError, match=r"expected 25 frames a second, found 12\.5"):
        Trace.load(path, frame_rate=25)


def test_memory_stays_with_the_numbers(tmp_path: Path) -> None:
    """At most 48 bytes a row and a megabyte, and that megabyte for a line that never ends."""
    path = written(tmp_path, "arrival,frames,note\n" + "".join(f"{n / 8},{n % 700 + 1},text that is not kept\n" for n in range(100_000)))
    endless = tmp_path / "endless.csv"
    endless.write_text("arrival,frames\n" + "7" * 20_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(FileError):
            Trace.load(endless)
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.reset_peak()
        assert len(Trace.load(path)) == 100_000
        assert tracemalloc.get_traced_memory()[1] < 2**20 + 48 * 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("arrival", "frames", "more", "says"),
    [
        ([], [], {}, "at least one"),
        ([0.0], [1, 2], {}, "one arrival and one length a request"),
        ([[0.0]], [[1]], {}, "one arrival and one length a request"),
        ([-1.0], [1], {}, "not negative; got -1"),
        ([math.nan], [1], {}, "got nan"),
        ([math.inf], [1], {}, "got inf"),
        ([0.0], [0], {}, "from 1 to 2147483647; got 0"),
        ([0.0], [2**31], {}, "got 2147483648"),
        ([0.0], [1.5], {}, "float64"),
        ([0.0], [1], {"frame_rate": 0}, "frame_rate is frames a second, positive; got 0"),
    ],
)
def test_a_trace_checks_its_requests(arrival: list[float], frames: list[int], more: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Trace(np.array(arrival), np.array(frames), **more)


def test_a_trace_keeps_its_own_arrays() -> None:
    arrival, frames = np.array([1.0, 0.0]), np.array([3, 4], dtype=np.int32)
    trace = Trace(arrival, frames)
    arrival[:], frames[:] = 9, 9
    assert (trace.arrival.tolist(), trace.frames.tolist(), trace.frames.dtype) == ([0, 1], [4, 3], np.int64)
    with pytest.raises(ValueError, match="read-only"):
        trace.frames[0] = 1


@given(requests, st.floats(0.01, 100))
def test_scale_speeds_up_the_arrivals_alone(rows: list[tuple[float, int]], load: float) -> None:
    arrival, frames = (np.array(column) for column in zip(*rows, strict=True))
    trace = Trace(arrival, frames, "a", source="b")
    scaled = trace.scale(load)
    assert np.array_equal(scaled.arrival, trace.arrival / load)
    assert np.array_equal(scaled.frames, trace.frames)
    assert (scaled.name, scaled.source) == ("a", f"b (arrivals {load:g} times as fast)")


@pytest.mark.parametrize("load", [0, -1, math.inf, math.nan])
def test_scale_refuses(load: float) -> None:
    with pytest.raises(ValueError, match=f"load is a positive factor; got {load}"):
        trace_of([1]).scale(load)


def test_histogram_frame_and_repr() -> None:
    trace = Trace(np.array([0.0, 1.0, 2.0]), np.array([25, 10, 25]), "three")
    assert [column.tolist() for column in trace.histogram()] == [[10, 25], [1, 2]]
    assert trace.to_frame().to_dict("list") == {"arrival": [0, 1, 2], "frames": [25, 10, 25], "seconds": [2, 0.8, 2]}
    assert repr(trace) == "Trace(three: 3 requests in 2 s, 10 to 25 frames)"


@given(st.integers(0, 2**32 - 1), st.floats(0, 4), st.floats(0, 2))
def test_the_same_seed_synthesises_the_same_trace(seed: int, burstiness: float, sigma: float) -> None:
    one, two, other = (Trace.synthesise(requests=50, seed=s, burstiness=burstiness, sigma=sigma) for s in (seed, seed, seed ^ 1))
    assert np.array_equal(one.arrival, two.arrival)
    assert np.array_equal(one.frames, two.frames)
    assert one.source == two.source != other.source
    if sigma > 0.1:
        assert not np.array_equal(one.frames, other.frames)


def test_synthesise_has_the_moments_asked_for() -> None:
    trace = Trace.synthesise(requests=100_000, rate=5, mean_frames=100, sigma=0.5, burstiness=2, max_frames=400, seed=1)
    gaps = np.diff(trace.arrival)
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(2, rel=0.03)
    assert trace.frames.mean() == pytest.approx(100, rel=0.01)
    assert np.log(trace.frames).std() == pytest.approx(0.5, rel=0.02)
    assert trace.frames.max() == 400
    regular = Trace.synthesise(requests=5, rate=4, sigma=0, burstiness=0)
    assert (regular.arrival.tolist(), set(regular.frames.tolist())) == ([0, 0.25, 0.5, 0.75, 1], {150})


def test_synthesise_draws_from_the_frozen_generator() -> None:
    """Numbers of numpy 1.26 to 2.4: a version that gave others would change what shipped traces stand for."""
    trace = Trace.synthesise(requests=4, seed=7)
    assert trace.arrival.tolist() == [0.0, 0.073884, 0.200008, 0.210393]
    assert trace.frames.tolist() == [246, 176, 66, 95]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"requests": 0}, "requests is from 1 to 2147483647; got 0"),
        ({"rate": 0.0}, "rate is from 1e-09 to 1000000000.0; got 0"),
        ({"rate": math.nan}, "rate .*got nan"),
        ({"mean_frames": math.inf}, "mean_frames .*got inf"),
        ({"max_frames": 0}, "max_frames .*got 0"),
        ({"sigma": -0.1}, "sigma is from 0 to 10; got -0.1"),
        ({"burstiness": -1.0}, "burstiness is from 0 to 100; got -1"),
        ({"seed": -1}, "[Ss]eed"),
    ],
)
def test_synthesise_refuses(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Trace.synthesise(**wrong)


def test_the_assistant_trace_is_what_its_seed_gives() -> None:
    shipped = Trace.load(TRACES / "assistant.csv")
    call = ast.parse(shipped.source, mode="eval").body
    assert isinstance(call, ast.Call)
    made = Trace.synthesise(**{word.arg or "": ast.literal_eval(word.value) for word in call.keywords})
    assert np.array_equal(shipped.arrival, made.arrival)
    assert np.array_equal(shipped.frames, made.frames)
    assert (shipped.name, shipped.source, shipped.frame_rate) == (made.name, made.source, made.frame_rate)
    assert shipped.source in " ".join((ROOT / "data" / "README.md").read_text(encoding="utf-8").split())


def test_the_utterances_are_consistent() -> None:
    path = TRACES / "utterances.csv"
    trace = Trace.load(path)
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    assert list(rows[0]) == ["id", "seconds", "arrival", "frames"]
    assert len({row["id"] for row in rows}) == len(rows) == len(trace) == 13100
    assert [math.ceil(round(float(row["seconds"]) * 12.5, 3)) for row in rows] == trace.frames.tolist()
    assert "espeak-ng 1.51 -v en-us -s 160 -z" in trace.source


@pytest.mark.parametrize("name", ["assistant", "utterances"])
def test_what_the_readme_says_of_a_shipped_trace_is_so(name: str) -> None:
    trace = Trace.load(TRACES / f"{name}.csv")
    readme = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    row = next(line for line in readme.splitlines() if line.startswith(f"| traces/{name}.csv |"))
    found = [int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", row.partition("|")[2].partition("|")[2])]
    streamed, offline = trace.calls(25, 25), trace.calls(300, 25)
    quartiles = [round(q) for q in np.percentile(trace.frames, [50, 95])]
    assert found == [len(trace), round(trace.duration), *quartiles, trace.frames.max(), sum(streamed.values()), sum(offline.values())]
    assert (TRACES / f"{name}.csv").stat().st_size < 1_000_000
