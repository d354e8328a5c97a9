"""The schedule, without a model: kept spans tile the output, calls see what exists, and streams cut as files are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from omnigraph import Trace
from omnigraph.chunks import Chunk, Chunking, schedule


@st.composite
def cuts(draw: st.DrawFn) -> Chunking:
    upsample = draw(st.integers(1, 9))
    trims = [0, 1, upsample - 1, upsample + 1, 3 * upsample, 4 * upsample + 2, -1, -upsample]
    return Chunking(
        chunk_size=draw(st.integers(1, 12)),
        left_context_size=draw(st.integers(0, 15)),
        upsample=upsample,
        trim=draw(st.sampled_from(trims)),
        ramp=tuple(draw(st.lists(st.integers(1, 9), max_size=4))),
        lookahead=draw(st.integers(0, 5)),
    )


def starts_of(cut: Chunking, frames: int) -> list[int]:
    """Where chunks begin, said another way: the running sum of the ramp, then of the chunk size."""
    starts, sizes = [0], list(cut.ramp)
    while starts[-1] < frames:
        starts.append(starts[-1] + (sizes.pop(0) if sizes else cut.chunk_size))
    return starts[:-1]


@given(cuts(), st.integers(0, 150))
def test_kept_spans_tile_the_output(cut: Chunking, frames: int) -> None:
    assume(cut.left_context_size >= cut.context_needed)
    chunks = cut.schedule(frames)
    assert [c.at for c in chunks[:1]] == [0] * bool(chunks)
    assert all(a.at + a.keep == b.at for a, b in pairwise(chunks))
    assert sum(c.keep for c in chunks) == cut.samples(frames)
    assert all(c.keep > 0 for c in chunks)


@given(cuts(), st.integers(0, 150))
def test_calls_see_frames_that_exist_and_keep_samples_that_are_final(cut: Chunking, frames: int) -> None:
    assume(cut.left_context_size >= cut.context_needed)
    for c in cut.schedule(frames):
        assert 0 <= c.first < c.last <= frames
        assert c.skip >= 0
        assert c.skip + c.keep <= (c.last - c.first) * cut.upsample - cut.trim  # what the call gives
        assert c.at == c.first * cut.upsample + c.skip  # the same sample of the whole
        if c.last < frames:
            assert c.at + c.keep == (c.last - cut.lookahead) * cut.upsample - cut.trim  # the next frame would not matter to any of it


@given(cuts(), st.integers(0, 150))
def test_each_chunk_sees_its_context_and_its_lookahead(cut: Chunking, frames: int) -> None:
    assume(cut.left_context_size >= cut.context_needed)
    seen = {(c.first, c.last) for c in cut.schedule(frames)}
    expected = set()
    for start in starts_of(cut, frames):
        end = cut.end(start)
        last = min(end + cut.lookahead, frames)
        if cut.samples(end if last < frames else frames) > cut.samples(start):
            expected.add((max(start - cut.left_context_size, 0), last))
        if end + cut.lookahead > frames:
            break  # it saw the last frame: nothing is left
    assert seen == expected


@given(cuts(), st.one_of(st.integers(1, 9), st.integers(1, 150)))
def test_a_refused_context_names_the_smallest_that_works(cut: Chunking, frames: int) -> None:
    def works(context: int) -> bool:
        try:
            chunks = schedule(
                frames,
                chunk_size=cut.chunk_size,
                left_context_size=context,
                upsample=cut.upsample,
                trim=cut.trim,
                ramp=cut.ramp,
                lookahead=cut.lookahead,
            )
        except ValueError:
            return False
        assert sum(c.keep for c in chunks) == cut.samples(frames)
        return all(c.skip >= 0 for c in chunks)

    smallest = next(context for context in range(100) if works(context))
    assert smallest <= cut.context_needed
    if cut.left_context_size < smallest:
        with pytest.raises(ValueError, match=f"needs at least {smallest} frames"):
            cut.schedule(frames)
    else:
        assert works(cut.left_context_size)


@given(cuts(), st.lists(st.integers(0, 40), max_size=12))
def test_arrival_does_not_change_the_cuts(cut: Chunking, arrivals: list[int]) -> None:
    assume(cut.left_context_size >= cut.context_needed)
    start, frames, found = 0, 0, []
    for n in arrivals:
        frames += n
        chunks, start = cut.due(start, frames, ended=False)
        found += chunks
        assert frames - start < max(cut.chunk_size, *cut.ramp, 0) + cut.lookahead  # nothing that is due waits
    found += cut.due(start, frames, ended=True)[0]
    assert found == cut.schedule(frames)


def test_codes_shorter_than_the_trim_needs_want_less_context() -> None:
    """Five frames of trim would want five of context, but with four every call begins at frame 0."""
    with pytest.raises(ValueError, match="needs at least 4 frames"):
        schedule(5, chunk_size=1, left_context_size=3, upsample=2, trim=9)
    assert schedule(5, chunk_size=1, left_context_size=4, upsample=2, trim=9) == [Chunk(0, 5, 0, 1, 0)]


def test_no_frames_no_chunks() -> None:
    assert schedule(0, chunk_size=2, left_context_size=0, upsample=4) == []


def test_a_trim_of_several_frames_is_taken_from_context() -> None:
    chunks = schedule(9, chunk_size=3, left_context_size=3, upsample=2, trim=5)
    assert chunks == [Chunk(0, 3, 0, 1, 0), Chunk(0, 6, 1, 6, 1), Chunk(3, 9, 1, 6, 7)]


def test_first_chunks_that_give_nothing_need_no_call() -> None:
    chunks = schedule(6, chunk_size=1, left_context_size=4, upsample=2, trim=7)
    assert chunks == [Chunk(0, 4, 0, 1, 0), Chunk(0, 5, 1, 2, 1), Chunk(1, 6, 1, 2, 3)]
    assert schedule(3, chunk_size=1, left_context_size=0, upsample=2, trim=7) == []


def test_code2wav_loses_no_sample() -> None:
    chunks = schedule(3000, chunk_size=300, left_context_size=25, upsample=1920, trim=555)
    assert sum(c.keep for c in chunks) == 3000 * 1920 - 555
    assert {c.skip for c in chunks[1:]} == {25 * 1920 - 555}


@pytest.mark.parametrize("ramp", [(), (5,), (4, 4, 8, 16)])
@pytest.mark.parametrize("frames", [1, 5, 24, 25, 26, 60, 143])
def test_the_trace_counts_the_calls_that_are_made(frames: int, ramp: tuple[int, ...]) -> None:
    chunks = schedule(frames, chunk_size=25, left_context_size=25, upsample=1, ramp=ramp)
    trace = Trace([0.0], [frames])
    assert sorted(c.last - c.first for c in chunks) == sorted(
        shape.frames for shape, n in trace.calls(chunk_size=25, left_context_size=25, ramp=ramp).items() for _ in range(n)
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunk_size": 0},
        {"chunk_size": 2.0},
        {"left_context_size": -1},
        {"upsample": 0},
        {"lookahead": -1},
        {"ramp": (4, 0)},
        {"chunk_size": True},
        {"trim": 0.5},
    ],
)
def test_sizes_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        schedule(5, **{"chunk_size": 2, "left_context_size": 1, "upsample": 4, **wrong})


def test_negative_frames_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot cut -1 frames"):
        schedule(-1, chunk_size=2, left_context_size=1, upsample=4)
