"""Plans say what they hold or refuse it; `route` is the cheapest way there is, against a search of all."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnigraph._files import FileError
from omnigraph.shapes import MAX_WASTE, Bucket, BucketPlan, Cost, Part, Route, Shape, route


def frames_of(plan: BucketPlan) -> list[int]:
    return [shape.frames for shape in plan.plain]


def test_shapes_and_buckets_read_well() -> None:
    assert str(Shape(4, 25)) == "4x25"
    assert str(Bucket(Shape(4, 25))) == "4x25"
    assert str(Bucket(Shape(4, 25), True)) == "4x25 compiled"
    assert Shape(4, 25) == (4, 25)
    assert repr(BucketPlan(((1, 2),), ((3, 4),))) == "BucketPlan(plain=1x2, compiled=3x4)"


def test_grid_is_every_batch_size_with_every_length() -> None:
    plan = BucketPlan.grid([4, 1], [50, 25], extra=[(8, 25)], compiled=[(1, 25), (2, 7)])
    assert set(plan.plain) == {(4, 50), (4, 25), (1, 50), (8, 25)}
    assert set(plan.compiled) == {(1, 25), (2, 7)}
    assert len(plan) == 6
    assert plan == BucketPlan.grid([1, 4], [25, 50], extra=[(8, 25)], compiled=[(2, 7), (1, 25)])
    assert hash(plan.buckets) == hash(BucketPlan.grid([1, 4], [25, 50], extra=[(8, 25)], compiled=[(2, 7), (1, 25)]).buckets)


def test_buckets_come_largest_first() -> None:
    plan = BucketPlan.grid([1, 4], [2, 8, 40], compiled=[(4, 8)])
    sizes = [bucket.shape.batch * bucket.shape.frames for bucket in plan.buckets]
    assert sizes == sorted(sizes, reverse=True)
    assert Bucket(Shape(4, 8), True) in plan.buckets
    assert len(set(plan.buckets)) == len(plan) == 6


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((25, 25), [2, 4, 8, 16, 25, 32, 50, 64, 128, 256, 325]),
        ((0, 25), [2, 4, 8, 16, 32, 64, 128, 256, 325]),  # offline only
        ((0, 0), [2, 4, 8, 16, 32, 64, 128, 256, 325]),
        ((25, 0), [2, 4, 8, 16, 25, 32, 64, 128, 256, 325]),
        ((25, 72), [2, 4, 8, 16, 25, 32, 64, 97, 128, 256, 325]),
        ((16, 16), [2, 4, 8, 16, 32, 64, 128, 256, 325]),
        ((5, 5, (1,), 30, 10), [2, 4, 5, 8, 10, 16, 32, 40]),
        ((1, 0, (1,), 1, 0), [1]),
        ((400, 100, (1,), 300, 25), [2, 4, 8, 16, 32, 64, 128, 256, 325, 400, 500]),
        ((0, 0, (1,), 1024, 0), [2, 4, 8, 16, 32, 64, 128, 256, 1024]),
    ],
)
def test_from_chunking(arguments: tuple[Any, ...], expected: list[int]) -> None:
    assert frames_of(BucketPlan.from_chunking(*arguments)) == expected


def test_from_chunking_takes_every_batch_size() -> None:
    plan = BucketPlan.from_chunking(25, 25, [1, 4, 8])
    assert len(plan) == 33
    assert {shape.batch for shape in plan.plain} == {1, 4, 8}


@pytest.mark.parametrize("size", [0, -1, True, False, 2.0, "2", None, np.bool_(True)])
def test_sizes_that_are_no_positive_integers(size: Any) -> None:
    for make in (
        lambda: BucketPlan(((1, size),)),
        lambda: BucketPlan((), ((size, 1),)),
        lambda: BucketPlan.grid([size], [2]),
        lambda: BucketPlan.grid([1], [size]),
        lambda: BucketPlan.grid([1], [2], extra=[(2, size)]),
        lambda: BucketPlan.grid([1], [2], compiled=[(size, 2)]),
    ):
        with pytest.raises(ValueError, match="a shape is .batch, frames., both positive integers; got"):
            make()


@pytest.mark.parametrize("shape", [(1,), (1, 2, 3), 5, None, "12", ()])
def test_what_is_no_shape(shape: Any) -> None:
    with pytest.raises(ValueError, match="a shape is .batch, frames."):
        BucketPlan((shape,))


def test_numpys_integers_are_integers() -> None:
    plan = BucketPlan.grid(np.array([1, 4]), np.array([2, 8]), extra=[np.array([2, 2])])
    assert plan == BucketPlan.grid([1, 4], [2, 8], extra=[(2, 2)])
    assert all(type(n) is int for shape in plan.plain for n in shape)


@pytest.mark.parametrize("arguments", [(-1, 25), (25, -1), (25, 25, (1,), 0), (25, 25, (1,), -3), (25, 25, (1,), 300, -1)])
def test_chunk_sizes_out_of_range(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="chunk sizes and contexts are frames, not negative, the offline chunk at least 1; got"):
        BucketPlan.from_chunking(*arguments)


def test_empty_plans() -> None:
    for make in (
        BucketPlan,
        lambda: BucketPlan.grid([], [2]),
        lambda: BucketPlan.grid([1], []),
        lambda: BucketPlan.from_chunking(25, 25, []),
    ):
        with pytest.raises(ValueError, match="an empty plan captures nothing: give at least one"):
            make()


def test_duplicates() -> None:
    with pytest.raises(ValueError, match=r"batch_sizes lists a number more than once: \[1, 4, 1\]"):
        BucketPlan.grid([1, 4, 1], [2])
    with pytest.raises(ValueError, match=r"sizes lists a number more than once: \[2, 2\]"):
        BucketPlan.grid([1], [2, 2])
    with pytest.raises(ValueError, match="the grid with extra lists 1x2 more than once"):
        BucketPlan.grid([1], [2, 3], extra=[(1, 2)])
    with pytest.raises(ValueError, match="compiled lists 1x2 more than once"):
        BucketPlan.grid([1], [2], compiled=[(1, 2), (1, 2)])
    with pytest.raises(ValueError, match="plain lists 1x2, 4x2 more than once"):
        BucketPlan(((4, 2), (1, 2), (4, 2), (1, 2)))


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = BucketPlan.grid([1, 4], [2, 25], compiled=[(1, 25)])
    plan = BucketPlan(plan.plain, plan.compiled, {"model": "Code2Wav", "dtype": "bfloat16"})
    path = plan.save(tmp_path / "plans" / "plan.json")
    assert BucketPlan.load(path) == plan
    assert json.loads(path.read_text())["schema"] == "omnigraph.plan/1"


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"plain": [[1, 2]]},
        {"plain": [[1, 2]], "compiled": []},
        {"plain": [], "compiled": [], "made_for": {}},
        {"plain": [[1, 0]], "compiled": [], "made_for": {}},
        {"plain": [[1, 2.5]], "compiled": [], "made_for": {}},
        {"plain": [[1, True]], "compiled": [], "made_for": {}},
        {"plain": [[1, 2], [1, 2]], "compiled": [], "made_for": {}},
        {"plain": [[1, 2, 3]], "compiled": [], "made_for": {}},
        {"plain": ["12"], "compiled": [], "made_for": {}},
        {"plain": [12], "compiled": [], "made_for": {}},
        {"plain": 3, "compiled": [], "made_for": {}},
        {"plain": [[1, 2]], "compiled": [], "made_for": []},
    ],
)
def test_files_that_hold_no_plan(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"schema": "omnigraph.plan/1", **content}))
    with pytest.raises(FileError, match=r"plan\.json: not a plan: "):
        BucketPlan.load(path)


# -- route --


def plain(*shapes: tuple[int, int]) -> list[Bucket]:
    return [Bucket(Shape(*shape)) for shape in shapes]


def parts(found: Route) -> list[tuple[str, int]]:
    return [(str(part.bucket), part.rows) for part in found.parts]


def test_the_cheapest_bucket_not_the_nearest_length() -> None:
    captured = plain((4, 32), (1, 64))
    assert parts(route(Shape(1, 30), captured, max_waste=5)) == [("1x64", 1)]
    assert parts(route(Shape(4, 30), captured)) == [("4x32", 4)]
    assert parts(route(Shape(2, 30), captured, max_waste=5)) == [("4x32", 2)]  # a tie in frames goes to fewer replays
    assert route(Shape(1, 30), captured).miss == "too_much_padding"
    assert parts(route(Shape(1, 40), plain((4, 41), (1, 42)))) == [("1x42", 1)]


def test_what_a_route_says_of_itself() -> None:
    captured = plain((1, 8), (4, 8))
    exact, padded, split = route(Shape(4, 8), captured), route(Shape(1, 7), captured), route(Shape(6, 7), captured)
    assert [r.kind for r in (exact, padded, split)] == ["exact", "padded", "split"]
    assert [r.padding for r in (exact, padded, split)] == [0, 1, 6 * 8 - 6 * 7]
    assert parts(split) == [("4x8", 4), ("1x8", 1), ("1x8", 1)]
    none = route(Shape(1, 9), captured)
    assert (none.kind, none.padding, none.miss, none.parts) == (None, 0, "no_bucket", ())
    assert route(Shape(1, 9), []).miss == "no_bucket"


def test_compiled_before_plain_at_the_same_bucket() -> None:
    both = [Bucket(Shape(1, 8)), Bucket(Shape(1, 8), True)]
    for captured in (both, both[::-1]):
        assert parts(route(Shape(1, 8), captured)) == [("1x8 compiled", 1)]
        assert parts(route(Shape(1, 7), captured)) == [("1x8 compiled", 1)]
        assert parts(route(Shape(2, 8), captured)) == [("1x8 compiled", 1)] * 2
        assert parts(route(Shape(1, 8), captured, lambda shape, how: {"plain": 1.0, "compiled": 2.0, "eager": 9.0}[how])) == [("1x8", 1)]
        assert parts(route(Shape(1, 8), captured, lambda shape, how: 1.0)) == [("1x8 compiled", 1)]
    assert parts(route(Shape(1, 8), [Bucket(Shape(1, 8)), Bucket(Shape(1, 9), True)])) == [("1x8", 1)]  # a smaller one is cheaper


def test_waste_is_capped_without_costs_and_not_with_them() -> None:
    captured = plain((1, 100))
    assert route(Shape(1, 50), captured).kind == "padded"  # exactly twice
    assert route(Shape(1, 49), captured).miss == "too_much_padding"
    assert route(Shape(1, 49), captured, max_waste=2.1).kind == "padded"
    assert route(Shape(1, 99), captured, max_waste=1.0).miss == "too_much_padding"
    assert route(Shape(1, 100), captured, max_waste=1.0).kind == "exact"
    assert route(Shape(1, 1), captured, lambda shape, how: 2.0 if how == "eager" else 1.0).kind == "padded"
    assert MAX_WASTE == 2.0


def test_eager_is_a_candidate_where_there_are_costs() -> None:
    captured = plain((1, 8))
    for eager, miss in ((0.9, "eager_is_faster"), (1.0, None), (1.1, None)):
        assert route(Shape(1, 8), captured, lambda shape, how, eager=eager: eager if how == "eager" else 1.0).miss == miss
    asked = []
    route(Shape(3, 7), captured, lambda shape, how: asked.append((shape, how)) or 1.0)
    assert set(asked) == {(Shape(1, 8), "plain"), (Shape(3, 7), "eager")}


def test_what_may_not_be_done_to_a_call() -> None:
    captured = plain((1, 8), (4, 8))
    assert route(Shape(1, 7), captured, pad_frames=False).miss == "no_bucket"
    assert route(Shape(1, 8), captured, pad_frames=False).kind == "exact"
    assert parts(route(Shape(3, 8), captured, pad_batch=False)) == [("1x8", 1)] * 3
    assert parts(route(Shape(3, 8), captured, split=False)) == [("4x8", 3)]
    assert route(Shape(3, 8), captured, split=False, pad_batch=False).miss == "no_bucket"
    assert route(Shape(5, 8), captured, split=False).miss == "no_bucket"
    assert route(Shape(3, 8), plain((2, 8)), pad_batch=False).miss == "no_bucket"
    assert parts(route(Shape(4, 8), captured, split=False, pad_batch=False, pad_frames=False)) == [("4x8", 4)]


def test_many_rows_are_quick() -> None:
    found = route(Shape(1000, 25), plain((1, 25), (7, 25), (64, 25)))
    assert sum(part.rows for part in found.parts) == 1000
    assert found.padding == 0
    assert len(found.parts) == 15 + 5 + 5


shapes = st.builds(Shape, st.integers(1, 4), st.integers(1, 5))
captures = st.lists(st.builds(Bucket, shapes, st.booleans()), max_size=6, unique=True)
calls = st.builds(Shape, st.integers(1, 6), st.integers(1, 5))
wastes = st.sampled_from([1.0, 1.5, 2.0, math.inf])
prices = st.none() | st.integers(0, 10**6)


def ways(call: Shape, captured: list[Bucket], pad_frames: bool, pad_batch: bool, split: bool) -> list[tuple[Bucket, ...]]:
    """Every multiset of buckets that can serve the call."""
    fits = [b for b in captured if b.shape.frames == call.frames or (pad_frames and b.shape.frames > call.frames)]
    found = []
    for n in range(1, (call.batch if split else 1) + 1):
        for some in itertools.combinations_with_replacement(fits, n):
            rows = sum(b.shape.batch for b in some)
            if rows == call.batch or (pad_batch and rows > call.batch):
                found.append(some)
    return found


@settings(max_examples=400)
@given(
    calls,
    captures,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1.0, 1.5, 2.0, math.inf]),
    st.none() | st.integers(0, 10**6),
)
def test_a_route_is_the_cheapest_of_all(
    call: Shape, captured: list[Bucket], pad_frames: bool, pad_batch: bool, split: bool, max_waste: float, seed: int | None
) -> None:
    cost: Cost | None = None
    if seed is not None:  # whole numbers, so that there are ties and sums are exact

        def cost(shape: Shape, how: str) -> float:
            return 1.0 + hash((seed, shape, how == "eager", how == "compiled")) % 7 * (2 if how == "eager" else 1)

    def paid(some: tuple[Bucket, ...]) -> float:
        if cost is None:
            return sum(b.shape.batch * b.shape.frames for b in some)
        return sum(cost(b.shape, "compiled" if b.compiled else "plain") for b in some)

    found = route(call, captured, cost, pad_frames=pad_frames, pad_batch=pad_batch, split=split, max_waste=max_waste)
    possible = ways(call, captured, pad_frames, pad_batch, split)
    best = min(((paid(some), len(some)) for some in possible), default=None)

    if best is None:
        expected_miss = "no_bucket"
    elif cost is None and best[0] > max_waste * call.batch * call.frames:
        expected_miss = "too_much_padding"
    elif cost is not None and best[0] > cost(call, "eager"):
        expected_miss = "eager_is_faster"
    else:
        expected_miss = None
    assert found.miss == expected_miss
    assert found.shape == call
    if expected_miss is not None:
        assert found.parts == ()
        return

    chosen = tuple(part.bucket for part in found.parts)
    assert (paid(chosen), len(chosen)) == best
    assert tuple(sorted(chosen)) in {tuple(sorted(some)) for some in possible}  # captured, and allowed
    assert sum(part.rows for part in found.parts) == call.batch
    assert all(1 <= part.rows <= part.bucket.shape.batch for part in found.parts)
    if not pad_batch:
        assert all(part.rows == part.bucket.shape.batch for part in found.parts)
    if len(chosen) == 1:
        equal = [some[0] for some in possible if len(some) == 1 and paid(some) == best[0]]
        assert chosen[0].compiled or not any(bucket.compiled for bucket in equal)
    assert found == route(call, captured[::-1], cost, pad_frames=pad_frames, pad_batch=pad_batch, split=split, max_waste=max_waste)


@given(calls, captures)
def test_a_captured_shape_is_served_exactly(call: Shape, captured: list[Bucket]) -> None:
    assert route(call, [*captured, Bucket(call)]).kind == "exact"


def test_routes_are_values() -> None:
    assert Route(Shape(1, 2), (Part(Bucket(Shape(1, 2)), 1),)) == route(Shape(1, 2), plain((1, 2)))


def test_a_plan_of_many_shapes_is_made_in_no_time() -> None:
    began = time.perf_counter()
    assert len(BucketPlan([(1, frames) for frames in range(1, 20_001)])) == 20_000
    assert time.perf_counter() - began < 2  # comparing all with all takes half a minute
