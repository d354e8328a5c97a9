from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnigraph._files import FileError
from omnigraph._measure import LEAST, time_calls
from omnigraph._points import Point, Surface
from omnigraph.models import tiny
from omnigraph.profile import SCHEMA, Profile
from omnigraph.shapes import Bucket, Shape

QUICK = {"repeats": LEAST, "seconds_each": 0.01, "progress": False}


def points(how: str = "eager", **each: float) -> list[Point]:
    """A full grid: 1, 2 and 8 rows of 10, 20 and 40 frames, 3 + rows * frames / 10 ms."""
    return [Point(Shape(b, f), how, 3 + b * f / 10, **each) for b in (1, 2, 8) for f in (10, 20, 40)]


@pytest.fixture
def profile() -> Profile:
    graphs = [Point(p.shape, "plain", p.ms / 2, 0.1, 7, 1000 * math.prod(p.shape), 10 * math.prod(p.shape), 0.5) for p in points()]
    return Profile((*points(), *graphs), {"model": "Tiny", "dtype": "float32"}, {"date": "2025-01-01"}, {"1x99": "OutOfMemoryError: no"})


def test_measured_shapes_cost_what_was_measured(profile: Profile) -> None:
    for p in profile.points:
        assert profile.cost(p.shape, p.how) == p.ms
        assert not profile.extrapolates(p.shape, p.how)


@pytest.mark.parametrize(
    ("shape", "ms"),
    [
        ((1, 15), 4.5),  # between two lengths
        ((5, 10), (5 + 11) / 2),  # between two batch sizes
        ((5, 30), (3 + 6 + 3 + 24) / 2),  # between both
        ((1, 5), 4.0),  # below: as the smallest
        ((1, 80), 3 + 8),  # beyond: straight on
        ((8, 50), 3 + 40),
        ((16, 20), 3 + 32),  # more rows than measured: as the largest batch at as many frames in all
    ],
)
def test_between_and_beyond(profile: Profile, shape: tuple[int, int], ms: float) -> None:
    outside = not (1 <= shape[0] <= 8 and 10 <= shape[1] <= 40)
    assert profile.extrapolates(Shape(*shape)) == outside
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert profile.cost(Shape(*shape), "eager") == pytest.approx(ms)


def test_extrapolation_warns_once(profile: Profile) -> None:
    with pytest.warns(UserWarning, match=r"1x80 eager lies outside the measured shapes"):
        profile.cost(Shape(1, 80), "eager")
    profile.cost(Shape(1, 81), "plain")  # warnings are errors: this one says nothing


def test_a_hole_in_the_grid_is_filled_from_its_own_row() -> None:
    holey = Profile(tuple(p for p in points() if p.shape not in (Shape(2, 20), Shape(8, 40))))
    assert holey.cost(Shape(2, 20), "eager") == pytest.approx(7)  # between 2x10 and 2x40
    assert holey.extrapolates(Shape(8, 40))
    assert holey.extrapolates(Shape(4, 40)), "its neighbour 8x40 was not measured"
    assert not holey.extrapolates(Shape(4, 20))


@given(
    st.dictionaries(st.tuples(st.sampled_from([1, 2, 3, 8]), st.integers(1, 30)), st.floats(0.1, 100), min_size=1),
    st.integers(1, 12),
    st.integers(1, 60),
)
def test_a_surface_is_exact_at_its_points_and_within_them_between(values: dict[tuple[int, int], float], batch: int, frames: int) -> None:
    surface = Surface({Shape(*s): v for s, v in values.items()})
    known, outside = surface.at(*np.array(list(values), dtype=float).T)
    np.testing.assert_allclose(known, list(values.values()))
    assert not outside.any()
    (value,), (beyond,) = surface.at(np.array([float(batch)]), np.array([float(frames)]))
    assert value > 0
    if not beyond:
        assert min(values.values()) - 1e-9 <= value <= max(values.values()) + 1e-9


def test_costs_are_the_cost_of_each(profile: Profile) -> None:
    shapes = [Shape(b, f) for b in range(1, 9) for f in range(10, 41, 3)]
    assert profile.costs(shapes, "plain").tolist() == [profile.cost(s, "plain") for s in shapes]


def test_pool_bytes_are_those_of_one_graph_alone_and_what_the_others_add(profile: Profile) -> None:
    buckets = [Bucket(Shape(1, 10)), Bucket(Shape(8, 40)), Bucket(Shape(2, 20))]
    assert profile.pool_bytes(buckets) == 1000 * 320 + 10 * (10 + 40)
    assert profile.pool_bytes(buckets) == profile.nbytes(Shape(8, 40), alone=True) + sum(profile.nbytes(b.shape) for b in buckets[::2])
    assert profile.pool_bytes([]) == 0
    assert profile.warmup_seconds(buckets) == 1.5


def test_nothing_measured_that_way(profile: Profile) -> None:
    with pytest.raises(ValueError, match="no compiled times"):
        profile.cost(Shape(1, 10), "compiled")


def test_save_and_load(profile: Profile, tmp_path: Path) -> None:
    again = Profile.load(profile.save(tmp_path / "p.json"))
    assert again == profile
    assert again.provenance == {"date": "2025-01-01"}
    assert again.failed == profile.failed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "omnigraph.plan/1"}, "expected the schema 'omnigraph.profile/1', found 'omnigraph.plan/1'"),
        ({"schema": SCHEMA, "points": []}, "needs at least one shape"),
        ({"schema": SCHEMA, "points": [{"shape": [1, 2], "how": "eager", "ms": -1.0}]}, "1x2 eager: times"),
        ({"schema": SCHEMA, "points": [{"shape": [1, 2], "how": "fast", "ms": 1.0}]}, "eager, plain or compiled, got 'fast'"),
        ({"schema": SCHEMA, "points": [{"shape": [1, 2], "how": "eager"}]}, "ms"),
        ({"schema": SCHEMA, "points": 3}, "not a profile"),
    ],
)
def test_a_file_that_is_no_profile(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"made_for": {}, "provenance": {}, "failed": {}, **change}))
    with pytest.raises(FileError, match=re.escape(message)):
        Profile.load(path)


def test_a_shape_measured_twice() -> None:
    with pytest.raises(ValueError, match="1x10 eager is listed more than once"):
        Profile((*points(), *points()))


def test_the_median_and_the_spread_of_calls() -> None:
    slow = iter([0, 0, *range(1, 100)])

    def call(_: torch.Tensor) -> None:
        torch.ones(1 + 200_000 * next(slow)).sum()

    middle, spread, repeats = time_calls(call, [torch.zeros(1)], 9, 100.0)
    assert repeats == 9
    assert spread > 0
    assert middle > 0


@pytest.fixture(scope="module")
def measured() -> Profile:
    return Profile.measure(tiny(), [(1, 4), (2, 8), (1, 8)], **QUICK)


def test_measure_times_every_shape_eagerly_and_by_replay(measured: Profile) -> None:
    assert [(p.shape, p.how) for p in measured.points] == [(Shape(*s), how) for s in ((1, 4), (1, 8), (2, 8)) for how in ("eager", "plain")]
    for p in measured.points:
        assert p.ms > 0
        assert p.spread >= 0
        assert p.repeats >= LEAST
    for p in measured.plain.values():
        assert p.bytes_alone >= p.bytes_marginal > 0
        assert p.seconds > 0
    alone = [measured.nbytes(s, alone=True) for s in ((1, 4), (1, 8), (2, 8))]
    assert alone == sorted(alone)
    assert alone[0] < alone[-1]
    assert measured.failed == {}
    assert measured.made_for["model"] == "TinyDecoder"
    assert {"device", "torch", "commit", "date", "method", "dtype"} <= set(measured.provenance)


def test_a_profile_of_another_model_says_so(measured: Profile) -> None:
    assert measured.check(tiny()) == []
    with pytest.warns(UserWarning, match="dtype 'float32', here it is 'float64'"):
        assert len(measured.check(tiny(dtype=torch.float64))) == 1


def test_resuming_measures_only_what_is_missing(measured: Profile, tmp_path: Path) -> None:
    path = measured.save(tmp_path / "p.json")
    module, seen = tiny(), set()
    module.register_forward_pre_hook(lambda _, args: seen.add(tuple(args[0].shape)))
    more = Profile.measure(module, [(1, 4), (2, 8), (1, 8), (1, 6)], resume=path, **QUICK)
    assert seen == {(1, 4, 6), (2, 4, 8)}, "the new shape, and the largest, for the pool that it shares"
    assert set(measured.points) < set(more.points)
    assert Profile.load(path) == more
    seen.clear()
    assert Profile.measure(module, [(1, 4), (1, 6)], resume=path, **QUICK) == more
    assert seen == set()


def test_resuming_with_another_model_is_refused(measured: Profile, tmp_path: Path) -> None:
    path = measured.save(tmp_path / "p.json")
    with pytest.raises(FileError, match="cannot be resumed, it was measured with config"):
        Profile.measure(tiny(hidden=8), [(1, 4)], resume=path, **QUICK)


def test_an_interrupt_keeps_what_is_measured(tmp_path: Path) -> None:
    path, module, seen = tmp_path / "p.json", tiny(), []

    def hook(_: object, args: tuple[torch.Tensor]) -> None:
        seen.append(args[0].shape[-1])
        if args[0].shape[-1] == 5:
            raise KeyboardInterrupt

    module.register_forward_pre_hook(hook)
    with pytest.warns(UserWarning, match="interrupted: the profile holds the 2 points"):
        kept = Profile.measure(module, [(1, 4), (1, 5), (1, 6)], resume=path, **QUICK)
    assert [(p.shape.frames, p.how) for p in kept.points] == [(4, "eager"), (4, "plain")]
    assert Profile.load(path) == kept
    full = Profile.measure(tiny(), [(1, 4), (1, 5), (1, 6)], resume=path, **QUICK)
    assert {p.shape.frames for p in full.points} == {4, 5, 6}
    assert set(kept.points) < set(full.points)


def test_an_interrupt_before_the_first_point_goes_on_its_way() -> None:
    module = tiny()
    module.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Profile.measure(module, [(1, 4)], **QUICK)


def test_a_graph_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    found = Profile.measure(tiny(host_read=True), [(1, 4), (1, 8)], resume=tmp_path / "p.json", **QUICK)
    assert list(found.eager) == [Shape(1, 4), Shape(1, 8)]
    assert found.plain == {}
    assert list(found.failed) == ["1x4", "1x8"]
    assert found.failed["1x4"].startswith("CaptureError: ")
    assert Profile.load(tmp_path / "p.json").failed == found.failed


def test_the_time_limit() -> None:
    with pytest.warns(UserWarning, match="1e-09 s are over: 1 of 6 points"):
        found = Profile.measure(tiny(), [(1, 4), (1, 5), (1, 6)], seconds=1e-9, **QUICK)
    assert len(found.points) == 1


def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation itself is torch's matter, and slow: a compiler that does nothing shows that the compiled module is what is timed."""
    monkeypatch.setattr("omnigraph._measure.compile_module", lambda module: module)
    found = Profile.measure(tiny(), [(1, 4)], compiled=[(1, 5)], **QUICK)
    assert [(p.shape.frames, p.how) for p in found.points] == [(4, "eager"), (4, "plain"), (5, "eager"), (5, "plain"), (5, "compiled")]


@pytest.mark.parametrize(
    ("shapes", "more", "message"),
    [([], {}, "got 0 shapes"), ([(1, 0)], {}, "positive batch and frames"), ([(1, 4)], {"repeats": 1}, "at least 5 repeats")],
)
def test_bad_input(shapes: list[tuple[int, int]], more: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Profile.measure(tiny(), shapes, **{**QUICK, **more})


def test_to_frame(profile: Profile) -> None:
    frame = profile.to_frame()
    assert len(frame) == len(profile.points)
    assert frame.query("how == 'plain'").speedup.tolist() == [2.0] * 9


@pytest.mark.gpu
def test_on_a_gpu_a_replay_of_a_small_call_is_faster() -> None:
    found = Profile.measure(tiny(device="cuda"), [(1, 4), (4, 64)], compiled=[(1, 4)], **QUICK)
    assert found.failed == {}
    assert found.plain[Shape(1, 4)].ms < found.eager[Shape(1, 4)].ms
    assert found.compiled[Shape(1, 4)].seconds > found.plain[Shape(1, 4)].seconds
    assert found.plain[Shape(1, 4)].bytes_alone > 0


SHIPPED = sorted((Path(__file__).parents[1] / "data" / "profiles").glob("*.json"))
TO_DO = {
    "h200_code2wav_bf16": "its host was busy: eager times of short calls are up to twice what they should be, and five shapes are missing"
}


def shipped(path: Path) -> Any:
    marks = [pytest.mark.xfail(strict=True, reason=TO_DO[path.stem])] if path.stem in TO_DO else []
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.parametrize("path", [shipped(path) for path in SHIPPED])
def test_shipped_profiles_are_whole(path: Path) -> None:
    shipped = Profile.load(path)
    assert shipped.failed == {}
    assert shipped.plain.keys() == shipped.eager.keys()
    lengths = {b: sorted(s.frames for s in shipped.eager if s.batch == b) for b, _ in shipped.eager}
    assert all(len(own) >= 8 for own in lengths.values())
    assert len(lengths[1]) >= 20
    assert (lengths[1][0], lengths[1][-1]) == (1, 325)
    assert {"device", "driver", "torch", "dtype", "model", "config", "commit", "date", "method"} <= shipped.provenance.keys()
    for p in shipped.points:
        assert p.spread > 0
        assert p.repeats >= LEAST
        assert p.how == "eager" or p.bytes_alone >= p.bytes_marginal > 0
        longer = [q.ms for q in shipped.points if (q.how, q.shape.batch) == (p.how, p.shape.batch) and q.shape.frames > p.shape.frames]
        assert p.ms <= 1.25 * min(longer, default=p.ms), f"{p.shape} {p.how} is slower than a longer call"
