"""Figures are read alone: each says what its axes are, in which units, and where its numbers are from."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from omnigraph import figures
from omnigraph.shapes import Shape

pd = pytest.importorskip("pandas")
go = pytest.importorskip("plotly.graph_objects")

SOURCE = "measured on a drawing board, 1970-01-01"


def latency() -> Any:
    times = {
        f"{way}_ms{part}": [value * scale for scale in (1, 2)]
        for way, value in (("eager", 4.0), ("decode", 2.0))
        for part in ("", "_q1", "_q3")
    }
    return pd.DataFrame({"shape": ["1x4", "8x50"], "kind": "exact", "bucket": ["1x4", "8x50"], "calls": [3, 1], **times})


def outcomes() -> Any:
    return pd.DataFrame({"frames": [50, 9, 100, 50], "kind": ["exact", "padded", "fallback", "exact"], "calls": [7, 2, 1, 3]})


def memory() -> Any:
    return pd.DataFrame({"captured": ["8x50", "1x4", ""], "mib": [12.0, 0.1, 0.0]})


def errors(**columns: Any) -> Any:
    """2x9 padded and good, 10x9 exact, 2x10 bad; 10x10 was not compared."""
    rows = {"batch": [2, 10, 2], "frames": [9, 9, 10], "bucket": ["2x10", "10x9", "2x10"], "bitwise": [False, True, False]}
    return pd.DataFrame(rows | {"error": [2e-6, 1e-6, 5e-4], "eager_error": [1.9e-6, 1e-6, 1e-6], "ok": [True, True, False]} | columns)


def noise() -> Any:
    return pd.DataFrame({"decoder": ["b", "b", "a", "a"], "frame": [0, 1, 0, 1], "snr_db": [math.inf, 120.0, 30.0, -3.0]})


def audio() -> Any:
    return pd.DataFrame({"full": [0.1, 0.2, -0.1], "in chunks": [0.1, 0.25, -0.1]}, index=[99, 100, 101])


def contexts() -> Any:
    rows = {"dtype": ["float32", "float32", "bfloat16"], "context": [4, 8, 4], "error": [1e-2, 1e-6, 4e-2]}
    return pd.DataFrame(rows | {"snr_db": [40.0, 120.0, 28.0]})


def windows(ways: int = 1) -> Any:
    one = {"call": [0, 0, 1], "batch": [2, 2, 1], "length": [50, 50, 25], "row": [0, 1, 0], "frames": [50, 40, 12], "request": [0, 1, 1]}
    return pd.concat([pd.DataFrame(one).assign(way=f"way {n}") for n in range(ways)])


def ramps() -> Any:
    times = {f"first_ms{part}": [20.0 + n, 10.0 + n] for n, part in enumerate(("_q1", "", "_q3"))}
    return pd.DataFrame({"ramp": ["5", "5"], "way": ["eager", "graphs"], **times})


def seams(frame: Any, source: str) -> Any:
    return figures.seams(frame, [100], source)


def served() -> Any:
    """1x9: 3 of 4 calls hit; 10x9 by a compiled graph; 2x10 eager; nothing of 1x10."""
    rows = {"batch": [1, 1, 1, 10, 2], "frames": [9, 9, 9, 9, 10], "kind": ["exact", "split", "fallback", "padded", "fallback"]}
    return pd.DataFrame(rows | {"compiled": [False, False, False, True, False], "calls": [2, 1, 1, 5, 7]})


def spread() -> Any:
    ways = ["eager", "eager", "eager", "this plan", "this plan"]
    return pd.DataFrame({"way": ways, "ms": [10.0, 20.0, 30.0, 3.0, 2.0], "calls": [93, 4, 3, 60, 40]})


def timeline(calls: int = 3) -> Any:
    rows = {"start": [0.5 * n for n in range(calls)], "ms": 2.0, "batch": 1, "frames": 25, "kind": "exact", "compiled": False}
    frame = pd.DataFrame(rows | {"bucket": "1x25", "reason": ""})
    frame.loc[1, ["kind", "bucket", "reason"]] = ["fallback", "", "no_bucket"]
    return frame


def work() -> Any:
    return pd.DataFrame({"bucket": ["1x25", "8x50", "eager"], "asked_frames": [100, 700, 50], "padded_frames": [0, 150, 0]})


def costs() -> Any:
    return pd.DataFrame({"bucket": ["1x25", "8x50", "scratch of all"], "mib": [1.5, 9.0, 400.0], "seconds": [0.1, 20.0, 0.0]})


def gains(graphs: int = 3) -> Any:
    return pd.DataFrame({"graphs": range(graphs), "ms": [12.0 / (n + 1) for n in range(graphs)], "buckets": ["", *["1x25"] * (graphs - 1)]})


def sides() -> Any:
    return pd.DataFrame({"ms": [12.0, 5.0], "graphs": [0, 3], "hit_rate": [0.0, 0.97]}, index=["eager", "plan"])


def profile() -> Any:
    rows = {"batch": [1, 1, 2], "frames": [25, 50, 25], "how": ["eager", "plain", "plain"], "ms": [12.0, 5.0, 8.0], "spread": 0.2}
    return pd.DataFrame(rows)


def loads() -> Any:
    rows = {
        "load": [2, 1, 1, 2],
        "plan": ["eager", "eager", "plan", "plan"],
        "first_audio_p50": 0.2,
        "first_audio_p95": [9.0, 0.5, 0.4, 0.6],
    }
    return pd.DataFrame(rows | {"underrun_share": [0.5, 0.0, 0.0, 0.01], "saturated": [True, False, False, False]})


def predicted() -> Any:
    rows = {"shape": ["1x25", "8x50"], "kind": ["exact", "fallback"], "calls": [3, 1], "predicted_ms": [2.0, 30.0]}
    return pd.DataFrame(rows | {f"measured_ms{part}": [n, 30.0] for part, n in (("_q1", 2.0), ("", 3.0), ("_q3", 3.5))})


def calls_histogram(frame: Any, source: str) -> Any:
    return figures.calls_histogram({Shape(n, row.frames): row.calls for n, row in enumerate(frame.itertuples(), 1)}, source)


def speedups() -> Any:
    return profile().assign(speedup=[1.0, 2.5, 1.25])


def budgets() -> Any:
    rows = {"name": ["heuristic", "1/4", "1/8"], "pool_bytes": [2**33, 2**31, 2**30], "ms": [16.0, 15.0, 17.0]}
    return pd.DataFrame(rows | {"graphs": [33, 33, 20], "hit_rate": [0.99, 1.0, 0.8]})


def calls_of_work() -> Any:
    """Two shapes' counted work with their times; one was not compiled."""
    rows = {"shape": ["1x4", "8x50"], "flops": [2e10, 2e12], "bytes": [7e8, 4e10], "bytes_fused": [4e8, 5e9], "bytes_least": [3.6e8, 3.8e8]}
    kinds = {
        f"{kind}_{what}": [n, 2 * n]
        for n, kind in enumerate(("convolution", "product", "attention", "other"), 1)
        for what in ("ops", "bytes")
    }
    return pd.DataFrame(rows | kinds | {"eager_ms": [12.0, 37.0], "decode_ms": [3.0, 31.0], "compiled_ms": [2.0, math.nan]})


def roofline(frame: Any, source: str) -> Any:
    return figures.roofline(frame, figures.H200_BF16, source)


def time_bounds(frame: Any, source: str) -> Any:
    return figures.time_bounds(frame, figures.H200_BF16, source)


def host() -> Any:
    rows = {"group": ["push", "push", "planning"], "name": ["bare", "push", "route"], "us": [50.0, 80.0, 20.0]}
    return pd.DataFrame(rows | {"q1": [49.0, 79.0, 19.0], "q3": [52.0, 85.0, 25.0], "beyond": [0.0, 30.0, math.nan]})


def kernels() -> Any:
    rows = {"bucket": ["1x50", "1x50", "1x50", "1x4"], "kernel": ["gemm_a", "gemm_b", "sin", "sin"]}
    rows |= {"kind": ["product", "product", "elementwise", "elementwise"], "count": [3.0, 1.0, 9.0, 9.0]}
    return pd.DataFrame(rows | {"us": [40.0, 10.0, 30.0, 20.0], "replay_us": [100.0, 100.0, 100.0, 19.0]})


def compilers() -> Any:
    rows = {"variant": ["static", "static", "dynamic"], "shape": ["1x25", "1x50", None], "seconds": [17.0, 16.0, math.nan]}
    return pd.DataFrame(rows | {"graphs": [1, 1, math.nan], "stopped_after_s": [math.nan, math.nan, 240.0]})


def ways() -> Any:
    rows = {"shape": ["1x4", "1x4"], "way": ["eager", "omnigraph"], "ms": [12.0, 3.0], "q1": [11.0, 2.9], "q3": [13.0, 3.1]}
    return pd.DataFrame(rows | {"start_s": [0.0, 0.4]})


DRAWN: dict[Callable[..., Any], tuple[Any, str, str]] = {  # with what; words on the x axis and the y axis
    figures.latency_by_shape: (latency(), "batch x frames", "ms a call"),
    figures.outcomes_by_frames: (outcomes(), "frames", "calls"),
    figures.memory_by_bucket: (memory(), "batch x frames", "MiB"),
    figures.error_map: (errors(), "frames", "rows"),
    figures.snr_by_frame: (noise(), "frame", "dB"),
    seams: (audio(), "sample", "amplitude"),
    figures.error_by_context: (contexts(), "frames", "relative"),
    figures.packing: (windows(), "frames", ""),  # the calls have their names on the y axis
    figures.first_audio: (ramps(), "frames", "ms"),
    figures.hit_map: (served(), "frames", "rows"),
    figures.latency_distribution: (spread(), "ms", "%"),
    figures.call_timeline: (timeline(), "seconds", "ms"),
    figures.padded_work_by_bucket: (work(), "batch x frames", "frames"),
    figures.bucket_costs: (costs(), "MiB", "batch x frames"),
    figures.gain_curve: (gains(), "graphs", "ms a call"),
    figures.side_by_side: (sides(), "ms a call", ""),
    calls_histogram: (outcomes(), "frames", "calls"),
    figures.profile_curves: (profile(), "frames", "ms"),
    figures.speedup_curves: (speedups(), "frames", "times"),
    figures.budget_curve: (budgets(), "MiB", "ms a call"),
    figures.service_by_load: (loads(), "load", "seconds"),
    figures.predicted_against_measured: (predicted(), "predicted", "measured"),
    roofline: (calls_of_work(), "operations", "TFLOP/s"),
    time_bounds: (calls_of_work(), "batch x frames", "ms"),
    figures.bytes_by_kind: (calls_of_work(), "batch x frames", "%"),
    figures.cost_per_frame: (profile(), "frames", "µs"),
    figures.host_costs: (host(), "µs", ""),
    figures.kernels_by_time: (kernels(), "µs", ""),
    figures.compile_seconds: (compilers(), "s until", ""),
    figures.beside: (ways(), "batch x frames", "ms"),
}


def test_each_figure_is_tried_here() -> None:
    public = {name for name, _ in inspect.getmembers(figures, inspect.isfunction)}
    assert public <= set(figures.__all__)
    assert sorted(public - {f.__name__ for f in DRAWN}) == [], "add an example to DRAWN"


@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_it_names_its_axes_its_units_and_its_source(draw: Callable[..., Any]) -> None:
    frame, x, y = DRAWN[draw]
    before = frame.copy()
    figure = draw(frame, source=SOURCE)
    assert type(figure) is go.Figure  # no widget: nbval can compare it
    assert len(figure.data) >= 1
    assert figure.layout.title.text
    assert figure.layout.title.subtitle.text == SOURCE
    assert x in figure.layout.xaxis.title.text
    assert y in (figure.layout.yaxis.title.text or "")
    pd.testing.assert_frame_equal(frame, before)
    assert draw(frame, source=SOURCE).to_json() == figure.to_json()


@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_colours_are_those_that_the_colour_blind_tell_apart(draw: Callable[..., Any]) -> None:
    drawn = json.loads(draw(DRAWN[draw][0], source=SOURCE).to_json())["data"]
    colours = [part["color"] for trace in drawn for part in (trace.get("marker", {}), trace.get("line", {})) if "color" in part]
    assert set(colours) <= {*figures.COLOURS.values(), "black", "#D9D9D9"}
    bars = {trace["name"]: trace["marker"]["color"] for trace in drawn if trace["type"] == "bar"}
    assert len(set(bars.values())) == len(bars)


def cells(figure: Any) -> dict[tuple[str, str], tuple[Any, str]]:
    """What is drawn, by batch and frames."""
    heat = figure.data[0]
    return {(b, f): (heat.z[i][j], heat.text[i][j]) for i, b in enumerate(heat.y) for j, f in enumerate(heat.x)}


def test_an_error_map_shows_errors_and_how_they_compare_with_eagers() -> None:
    figure = figures.error_map(errors(), source=SOURCE)
    found = cells(figure)
    assert list(figure.data[0].y) == ["2", "10"]  # by number, not by letter
    assert list(figure.data[0].x) == ["9", "10"]
    assert found["2", "9"] == (pytest.approx(math.log10(2e-6), abs=1e-4), "1.05")
    assert found["10", "9"] == (-6, "=")
    assert found["2", "10"] == (pytest.approx(math.log10(5e-4), abs=1e-4), "500.00")
    assert math.isnan(found["10", "10"][0])
    assert found["10", "10"][1] == ""
    assert (figure.data[0].zmin, figure.data[0].zmax) == (-6, -3)
    assert list(figure.data[0].colorbar.ticktext)[:4] == ["1e-06", "2e-06", "5e-06", "1e-05"]


def test_what_is_not_as_eager_is_outlined() -> None:
    outlined = figures.error_map(errors(), source=SOURCE).data[1]
    assert (list(outlined.x), list(outlined.y), outlined.name) == (["10"], ["2"], "not as eager")
    assert len(figures.error_map(errors(ok=True), source=SOURCE).data) == 1


@pytest.mark.parametrize("error", [[0.0, 1e-6, math.nan], [0.0, 0.0, 0.0], [math.nan] * 3])
def test_errors_that_have_no_logarithm_are_left_white(error: list[float]) -> None:
    figure = figures.error_map(errors(error=error), source=SOURCE)
    assert [math.isnan(cells(figure)[key][0]) for key in (("2", "9"), ("10", "9"), ("2", "10"))] == [not e > 0 for e in error]
    assert list(figure.data[1].x) == ["10"]


def test_of_equal_shapes_the_worst_is_shown() -> None:
    twice = pd.concat([errors(), errors(error=1e-2, ok=False), errors()])
    assert {z for z, _ in cells(figures.error_map(twice, source=SOURCE)).values() if not math.isnan(z)} == {-2}
    lost = pd.concat([errors(error=math.nan, ok=False), errors()])
    assert all(math.isnan(z) for z, _ in cells(figures.error_map(lost, source=SOURCE)).values())


def test_equal_samples_have_a_place_in_the_figure() -> None:
    figure = figures.snr_by_frame(noise(), source=SOURCE)
    assert [(line.name, list(line.y)) for line in figure.data] == [("b", [160, 120]), ("a", [30, -3])]


def test_no_decoder_is_left_out() -> None:
    many = pd.DataFrame({"decoder": list("abcdefg"), "frame": 0, "snr_db": 50.0})
    assert [line.name for line in figures.snr_by_frame(many, source=SOURCE).data] == list("abcdefg")


def test_lengths_are_in_the_order_of_numbers() -> None:
    figure = figures.outcomes_by_frames(outcomes(), source=SOURCE)
    assert list(figure.layout.xaxis.categoryarray) == ["9", "50", "100"]
    assert {bar.name: dict(zip(bar.x, bar.y, strict=True)) for bar in figure.data} == {
        "exact": {"50": 10},
        "padded": {"9": 2},
        "fallback": {"100": 1},
    }


def test_what_was_not_captured_has_no_bar() -> None:
    assert list(figures.memory_by_bucket(memory(), source=SOURCE).data[0].x) == ["8x50", "1x4"]


def test_error_bars_go_from_quartile_to_quartile() -> None:
    frame = latency().assign(eager_ms_q1=[3.0, 8.0], eager_ms_q3=[6.0, 8.5])
    eager = figures.latency_by_shape(frame, source=SOURCE).data[0]
    assert (list(eager.error_y.arrayminus), list(eager.error_y.array)) == ([1, 0], [2, 0.5])


def test_joints_are_marked() -> None:
    figure = seams(audio(), source=SOURCE)
    assert [(line.x0, line.x1) for line in figure.layout.shapes] == [(100, 100)]


def test_each_way_of_packing_says_what_it_decodes() -> None:
    figure = figures.packing(windows(ways=2), source=SOURCE)
    assert [note.text for note in figure.layout.annotations] == [f"way {n}: 2 calls, 125 frames decoded for 102" for n in range(2)]
    assert figure.layout.xaxis2.title.text.startswith("frames decoded")
    assert list(figure.layout.yaxis.ticktext) == ["2x50", "1x25"]


def test_a_map_shows_what_most_calls_of_a_cell_are_and_the_share_of_hits() -> None:
    figure = figures.hit_map(served(), source=SOURCE)
    found = {key: (kind if math.isnan(kind) else figures.KINDS[int(kind)], text) for key, (kind, text) in cells(figure).items()}
    assert found["1", "9"] == ("exact", "75%")
    assert found["10", "9"] == ("compiled", "100%")
    assert found["2", "10"] == ("fallback", "0%")
    assert math.isnan(found["1", "10"][0])
    assert found["1", "10"][1] == ""
    assert list(figure.data[0].y) == ["1", "2", "10"]
    assert figure.layout.title.text.endswith("50.0% by replays")
    assert {trace.name: trace.marker.color for trace in figure.data[1:]} == {
        kind: figures.COLOURS[kind] for kind in figures.KINDS if kind != "padded"
    }


def test_a_map_of_many_lengths_counts_every_call_once() -> None:
    frame = pd.DataFrame(
        {"batch": 1, "frames": range(1, 1001), "kind": ["exact"] * 500 + ["fallback"] * 500, "compiled": False, "calls": 2}
    )
    heat = figures.hit_map(frame.assign(compiled=False), source=SOURCE).data[0]
    assert (len(heat.x), heat.x[0], heat.x[-1]) == (100, "1-10", "991-1000")
    assert list(heat.z[0]) == [0.0] * 50 + [4.0] * 50
    assert heat.customdata[0][0] == "20 exact"


def test_percentiles_are_those_of_the_calls_not_of_the_rows() -> None:
    eager, marks, plan, _ = figures.latency_distribution(spread(), source=SOURCE).data
    assert eager.name == "eager: p50 10, p95 20, p99 30 ms"
    assert list(marks.x) == [10, 20, 30]
    assert plan.name == "this plan: p50 3, p95 3, p99 3 ms"
    assert (list(plan.x), list(plan.y)) == ([2, 2, 3], [0, 40, 100])


def test_a_distribution_of_many_times_is_small_and_ends_at_all_calls() -> None:
    many = pd.DataFrame({"way": "eager", "ms": [float(n) for n in range(1, 20_001)], "calls": 1})
    line = figures.latency_distribution(many, source=SOURCE).data[0]
    assert len(line.x) <= 402
    assert (line.x[-1], line.y[-1]) == (20_000, 100)
    assert line.y[200] == pytest.approx(line.x[200] / 200, abs=0.01)


def test_a_timeline_keeps_what_is_rare() -> None:
    figure = figures.call_timeline(timeline(calls=2501), source=SOURCE)
    assert {trace.name: len(trace.x) for trace in figure.data} == {"exact (1 in 3 of 2,500)": 834, "fallback (1)": 1}
    assert figure.data[1].customdata[0] == "1x25: no_bucket"


def test_padded_work_is_a_share_of_all_that_is_decoded() -> None:
    figure = figures.padded_work_by_bucket(work(), source=SOURCE)
    assert figure.layout.title.text == "Padded work: 15.0% of all frames decoded"
    assert {bar.name: dict(zip(bar.x, bar.y, strict=True)) for bar in figure.data} == {
        "asked for": {"1x25": 100, "8x50": 700},
        "padding": {"1x25": 0, "8x50": 150},
        "decoded eagerly": {"eager": 50},
    }


def test_bucket_costs_are_added_up_and_listed_from_the_top() -> None:
    figure = figures.bucket_costs(costs().assign(compile_seconds=1.0), source=SOURCE)
    assert figure.layout.title.text == "Memory and warm-up: 410 MiB, 23.1 s"
    assert list(figure.layout.yaxis.categoryarray) == ["scratch of all", "8x50", "1x25"]
    assert list(figure.data[1].x) == pytest.approx([1.1, 21.0, 1.0])
    assert "seconds" in figure.layout.xaxis2.title.text


def test_the_plan_in_use_is_on_the_curve_and_in_sight() -> None:
    figure = figures.gain_curve(gains(200), SOURCE, knee=5, plan=(33, 1.5))
    assert (figure.data[1].x, figure.data[1].y, figure.data[1].name) == ((33,), (1.5,), "this plan: 33 graphs, 1.5 ms")
    assert figure.layout.xaxis.range[1] == 66.5
    assert figures.gain_curve(gains(4), SOURCE, plan=(33, 1.5)).layout.xaxis.range[1] == 33.5
    assert [note.text for note in figure.layout.annotations] == ["knee: 5"]


def test_loads_are_in_order_and_saturation_shows() -> None:
    eager = figures.service_by_load(loads(), source=SOURCE).data[0]
    assert (list(eager.x), list(eager.y), list(eager.marker.symbol)) == ([1, 2], [0.5, 9], ["circle", "circle-open"])
    assert list(figures.service_by_load(loads(), source=SOURCE).data[1].y) == [0, 50]


def test_how_far_off_a_prediction_is_weighs_by_calls() -> None:
    assert "takes 1.38 times" in figures.predicted_against_measured(predicted(), source=SOURCE).layout.title.text  # (3 * 1.5 + 1) / 4


def test_a_profile_is_drawn_for_one_batch_size() -> None:
    lines = figures.profile_curves(profile(), SOURCE, batch=1).data
    assert {line.name: list(line.y) for line in lines} == {"eager": [12], "replay": [5]}
    assert list(lines[0].error_y.array) == [0.1]


def test_calls_of_all_batch_sizes_are_counted_together() -> None:
    bar = calls_histogram(outcomes(), SOURCE).data[0]
    assert dict(zip(bar.x, bar.y, strict=True)) == {50: 10, 9: 2, 100: 1}


def test_one_miss_among_many_calls_is_not_all_hits() -> None:
    frame = pd.DataFrame({"batch": 1, "frames": 9, "kind": ["exact", "fallback"], "compiled": False, "calls": [99_999, 1]})
    figure = figures.hit_map(frame, source=SOURCE)
    assert figure.layout.title.text.endswith("99.9% by replays")
    assert cells(figure)["1", "9"] == (0, "99%")


def test_speedups_are_those_of_replays_by_the_frames_of_all_rows() -> None:
    lines = figures.speedup_curves(speedups(), SOURCE).data
    assert {line.name: (list(line.x), list(line.y)) for line in lines} == {"1 row": ([50], [2.5]), "2 rows": ([50], [1.25])}
    assert lines[0].customdata[0] == "1x50: 12.5 ms eager, 5 by replay"


def test_plans_for_a_budget_are_in_order_of_memory_and_the_baseline_stands_apart() -> None:
    plans, heuristic = figures.budget_curve(budgets(), SOURCE).data
    assert (list(plans.x), list(plans.y)) == ([1024, 2048], [17, 15])
    assert (list(heuristic.x), list(heuristic.y), heuristic.marker.symbol) == ([8192], [16], "star")


def test_what_is_reached_lies_under_the_roof() -> None:
    roof, *ways = (trace for trace in roofline(calls_of_work(), SOURCE).data if trace.mode != "text")
    assert {way.name: [round(y, 2) for y in way.y] for way in ways} == {
        "eager": [1.67, 54.05],
        "replay": [6.67, 64.52],
        "compiled replay": [10.0],
    }
    assert max(roof.y) == 989.5 and list(ways[0].x) == pytest.approx([2e10 / 7e8, 50])
    for way in ways:
        assert all(y < min(x * 4.8, 989.5) for x, y in zip(way.x, way.y, strict=True))


def test_bounds_are_bytes_and_operations_over_the_peaks() -> None:
    lines = {trace.name: list(trace.y) for trace in time_bounds(calls_of_work(), SOURCE).data if trace.mode == "lines"}
    assert lines["all bytes as eager moves them"] == pytest.approx([0.1458, 8.333], rel=1e-3)
    assert lines["all operations, at the device's peak"] == pytest.approx([0.0202, 2.021], rel=1e-3)


def test_kernels_and_the_gaps_between_them_make_the_replay() -> None:
    bars = {trace.name: dict(zip(trace.y, trace.x, strict=True)) for trace in figures.kernels_by_time(kernels(), SOURCE).data}
    assert bars["product"] == {"1x50": 50} and bars["elementwise"] == {"1x50": 30, "1x4": 20}
    assert bars["between kernels"] == {"1x50": 20, "1x4": 0}


def test_what_was_stopped_is_drawn_as_stopped() -> None:
    bars = {trace.name: dict(zip(trace.y, trace.x, strict=True)) for trace in figures.compile_seconds(compilers(), SOURCE).data}
    assert bars == {"1x25": {"static": 17}, "1x50": {"static": 16}, "stopped, not finished": {"dynamic": 240}}
