"""Streams: the pushes joined are the offline result, whatever arrives when, alone or many together; a failed push can be repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnigraph import GraphedDecoder, models, probe
from omnigraph._joining import chunked
from omnigraph.facts import DecoderFacts
from omnigraph.packing import Call, pack
from omnigraph.shapes import BucketPlan, Shape
from omnigraph.streaming import StreamSession, push_many

GRID = BucketPlan.grid([1, 2, 4, 8], [8, 16, 32]).buckets


class Plain:
    """A decoder without graphs that packs for `GRID`, and remembers the shapes of its calls."""

    device = torch.device("cpu")

    def __init__(self, module: models.TinyDecoder, facts: DecoderFacts) -> None:
        self.module, self.facts = module, facts
        self.calls: list[Shape] = []

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        self.calls.append(Shape(codes.shape[0], codes.shape[2]))
        return self.module(codes)

    def check(self, codes: torch.Tensor, *, empty: bool = False, values: bool = True) -> None:
        if codes.dim() != 3 or codes.shape[1] != self.facts.num_quantizers or codes.dtype != torch.int64:
            raise ValueError(f"codes {tuple(codes.shape)} of {codes.dtype}")
        if values and codes.numel() and not 0 <= codes.min() <= codes.max() < self.facts.codebook_size:
            raise ValueError("codes out of range")

    def pack(self, lengths: Sequence[int], max_batch_size: int | None = None) -> list[Call]:
        return pack(lengths, GRID, max_batch_size=max_batch_size, pad_frames=self.facts.causal)


@cache
def known(**knobs: int) -> tuple[models.TinyDecoder, DecoderFacts]:
    module = models.tiny(dtype=torch.float64, **knobs)
    return module, probe(module, reach=12, frames=24)


def plain(**knobs: int) -> Plain:
    return Plain(*known(**knobs))


def random_codes(frames: int) -> torch.Tensor:
    return torch.randint(32, (1, 4, frames))


def split(codes: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """`codes` in pieces of these sizes, the last with what is left."""
    pieces, at = [], 0
    for n in sizes:
        pieces.append(codes[..., at : at + n])
        at += n
    return [*pieces, codes[..., at:]]


@settings(max_examples=60)
@given(
    st.integers(0, 70),
    st.lists(st.integers(0, 30), max_size=20),
    st.sampled_from([0, 1, 7, 9, 20]),
    st.sampled_from([0, 2]),
    st.sampled_from([(), (5,), (1,), (4, 4, 8)]),
)
def test_a_stream_is_the_offline_result(frames: int, arrivals: list[int], trim: int, lookahead: int, ramp: tuple[int, ...]) -> None:
    decoder, codes = plain(trim=trim, lookahead=lookahead), random_codes(frames)
    session = StreamSession(decoder, chunk_size=9, left_context_size=6, ramp=ramp)
    audios = [session.push(piece) for piece in split(codes, arrivals)]
    audios.append(session.flush())
    joined = torch.cat(audios, -1)
    assert all(a.shape[:2] == (1, 1) and a.dtype == torch.float64 for a in audios)
    assert (session.frames, session.samples) == (frames, joined.shape[-1])
    offline = chunked(decoder, codes, chunk_size=9, left_context_size=6, ramp=ramp)
    torch.testing.assert_close(joined, offline, rtol=0, atol=1e-12)
    if joined.numel():
        torch.testing.assert_close(joined, decoder.module(codes), rtol=0, atol=1e-12)


@settings(max_examples=25)
@given(st.data())
def test_many_streams_together_are_each_alone(data: st.DataObject) -> None:
    decoder = plain(trim=9)
    cuts = [
        {
            "chunk_size": data.draw(st.sampled_from([3, 8, 11])),
            "left_context_size": 5,
            "ramp": data.draw(st.sampled_from([(), (1,), (4, 6)])),
        }
        for _ in range(5)
    ]
    sessions = [StreamSession(decoder, **cut) for cut in cuts]
    codes = [random_codes(data.draw(st.integers(0, 60))) for _ in sessions]
    audios: list[list[torch.Tensor]] = [[] for _ in sessions]
    pieces = [iter(split(c, data.draw(st.lists(st.integers(0, 15), max_size=6)))) for c in codes]
    while True:
        pushes = [(i, piece) for i, left in enumerate(pieces) if (piece := next(left, None)) is not None]
        if not pushes:
            break
        for (i, _), audio in zip(pushes, push_many(decoder, [(sessions[i], piece) for i, piece in pushes]), strict=True):
            audios[i].append(audio)
    for i, session in enumerate(sessions):
        joined = torch.cat([*audios[i], session.flush()], -1)
        torch.testing.assert_close(joined, chunked(decoder, codes[i], **cuts[i]), rtol=0, atol=1e-12)


def test_what_is_due_in_many_streams_takes_one_call() -> None:
    decoder = plain()
    sessions = [StreamSession(decoder, chunk_size=8, left_context_size=8) for _ in range(8)]
    for _ in range(3):
        push_many(decoder, [(session, random_codes(8)) for session in sessions])
    assert decoder.calls == [(8, 8), (8, 16), (8, 16)]


def test_audio_comes_as_soon_as_it_is_final() -> None:
    session = StreamSession(plain(trim=3), chunk_size=4, left_context_size=4, ramp=(2,))
    given_at = [session.push(random_codes(1)).shape[-1] for _ in range(11)]
    assert given_at == [0, 13, 0, 0, 0, 32, 0, 0, 0, 32, 0]
    assert session.flush().shape[-1] == 8
    ahead = StreamSession(plain(lookahead=2), chunk_size=4, left_context_size=4)
    assert [ahead.push(random_codes(1)).shape[-1] for _ in range(6)] == [0, 0, 0, 0, 0, 32]
    assert ahead.flush().shape[-1] == 16


def test_a_stream_holds_only_what_it_needs() -> None:
    session = StreamSession(plain(lookahead=2), chunk_size=8, left_context_size=5, ramp=(3,))
    for n in [1] * 50 + [200, 0, 7]:
        session.push(random_codes(n))
        assert session._held.shape[-1] < 5 + 8 + 2
        assert session._held.untyped_storage().nbytes() == session._held.numel() * 8


def test_codes_are_copied() -> None:
    decoder = plain()
    codes = random_codes(10)
    expected = decoder.module(codes)
    session = StreamSession(decoder, chunk_size=8, left_context_size=4)
    buffer = codes[..., :5].clone()
    audio = [session.push(buffer)]
    buffer.zero_()
    audio += [session.push(codes[..., 5:]), session.flush()]
    torch.testing.assert_close(torch.cat(audio, -1), expected, rtol=0, atol=1e-12)


def test_a_flushed_stream_wants_a_reset() -> None:
    decoder = plain()
    session = StreamSession(decoder, chunk_size=8, left_context_size=4)
    codes = random_codes(12)
    first = [session.push(codes), session.flush()]
    assert session.finished
    assert session.flush().shape == (1, 1, 0)
    for push in (session.push, lambda codes: push_many(decoder, [(session, codes)])):
        with pytest.raises(RuntimeError, match=r"reset\(\)"):
            push(codes)
    session.reset()
    assert all(map(torch.equal, [session.push(codes), session.flush()], first))


def state(session: StreamSession) -> tuple[object, ...]:
    return session.frames, session.samples, session.finished, session._start, session._held.tolist()


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(1, 4, 3), torch.zeros(1, 1, 3).long(), torch.zeros(4, 3).long(), torch.zeros(2, 4, 3).long(), torch.full((1, 4, 1), 32)],
)
def test_a_refused_push_leaves_the_stream_as_it_was(wrong: torch.Tensor) -> None:
    decoder = plain()
    session, other = (StreamSession(decoder, chunk_size=8, left_context_size=4) for _ in range(2))
    codes = random_codes(20)
    audio = [session.push(codes[..., :11])]
    before = state(session), state(other)
    with pytest.raises(ValueError, match="codes"):
        session.push(wrong)
    with pytest.raises(ValueError, match="codes"):
        push_many(decoder, [(session, codes[..., 11:]), (other, wrong)])
    assert (state(session), state(other)) == before
    audio += [session.push(codes[..., 11:]), session.flush()]
    torch.testing.assert_close(torch.cat(audio, -1), decoder.module(codes), rtol=0, atol=1e-12)


def test_a_push_or_flush_that_breaks_can_be_repeated() -> None:
    decoder = plain(trim=1)
    decoder.module.raise_in = 0
    sessions = [StreamSession(decoder, chunk_size=8, left_context_size=4) for _ in range(9)]
    codes = [random_codes(21) for _ in sessions]
    before = list(map(state, sessions))
    decoder.module.raise_in = 2  # the first packed call of the push succeeds, the second breaks
    with pytest.raises(RuntimeError, match="raises at this call"):
        push_many(decoder, list(zip(sessions, codes, strict=True)))
    assert list(map(state, sessions)) == before
    audios = push_many(decoder, list(zip(sessions, codes, strict=True)))
    decoder.module.raise_in = 1
    with pytest.raises(RuntimeError, match="raises at this call"):
        sessions[0].flush()
    assert not sessions[0].finished
    for session, audio, c in zip(sessions, audios, codes, strict=True):
        torch.testing.assert_close(torch.cat([audio, session.flush()], -1), decoder.module(c), rtol=0, atol=1e-12)


def test_streams_of_other_decoders_and_streams_listed_twice_are_refused() -> None:
    decoder, other = plain(), plain()
    session = StreamSession(decoder)
    with pytest.raises(ValueError, match="belongs to another decoder"):
        push_many(other, [(session, random_codes(3))])
    with pytest.raises(ValueError, match="twice"):
        push_many(decoder, [(session, random_codes(3)), (session, random_codes(3))])
    assert push_many(decoder, []) == []


def test_a_stream_needs_context_for_its_trim() -> None:
    with pytest.raises(ValueError, match="needs at least 3 frames"):
        StreamSession(plain(trim=20), chunk_size=8, left_context_size=2)
    with pytest.raises(ValueError, match="at least 1"):
        StreamSession(plain(), chunk_size=0)
    with pytest.raises(ValueError, match="keeps state"):
        StreamSession(plain(counter=True))


# Through graphs.


@pytest.fixture(scope="module")
def graphed() -> Iterator[GraphedDecoder]:
    with GraphedDecoder(models.tiny(dtype=torch.float64, trim=9), BucketPlan.grid([1, 4, 8], [5, 8, 16])) as decoder:
        decoder.warmup(strict=True)
        yield decoder


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 12)), max_size=40))
def test_streams_through_graphs_are_each_the_whole(graphed: GraphedDecoder, arrivals: list[tuple[int, int]]) -> None:
    """Codes come to any of nine streams in any order; each third arrival, all streams are pushed to together."""
    sessions = [graphed.stream(chunk_size=8, left_context_size=8, ramp=(5,)) for _ in range(9)]
    codes: list[list[torch.Tensor]] = [[] for _ in sessions]
    audios: list[list[torch.Tensor]] = [[] for _ in sessions]
    for step, (who, n) in enumerate(arrivals):
        chosen = range(9) if step % 3 == 0 else [who]
        pushes = [(sessions[i], random_codes(n if i == who else 4)) for i in chosen]
        for i, (_, new), audio in zip(chosen, pushes, graphed.push_many(pushes), strict=True):
            codes[i].append(new)
            audios[i].append(audio)
    for session, new, audio in zip(sessions, codes, audios, strict=True):
        joined = torch.cat([*audio, session.flush()], -1)
        everything = torch.cat([random_codes(0), *new], -1)
        torch.testing.assert_close(
            joined, graphed.chunked_decode(everything, chunk_size=8, left_context_size=8, ramp=(5,)), rtol=0, atol=1e-12
        )
        if joined.numel():
            torch.testing.assert_close(joined, graphed.module(everything), rtol=0, atol=1e-12)


def test_streams_that_are_due_together_share_replays(graphed: GraphedDecoder) -> None:
    sessions = [graphed.stream(chunk_size=8, left_context_size=8) for _ in range(8)]
    graphed.stats.reset()
    for _ in range(4):
        graphed.push_many([(session, random_codes(8)) for session in sessions])
    assert graphed.stats.to_calls() == {(8, 8): 1, (8, 16): 3}
    assert graphed.stats.hits == 4


def test_a_stream_goes_on_through_a_reconfiguration() -> None:
    with GraphedDecoder(models.tiny(dtype=torch.float64), BucketPlan.grid([1], [8, 16])) as decoder:
        decoder.warmup(strict=True)
        codes = random_codes(50)
        session = decoder.stream(chunk_size=8, left_context_size=8)
        audio = [session.push(codes[..., :20])]
        decoder.reconfigure(BucketPlan.grid([2], [12]))
        audio += [session.push(codes[..., 20:]), session.flush()]
        torch.testing.assert_close(torch.cat(audio, -1), decoder.module(codes), rtol=0, atol=1e-12)


def test_codes_out_of_range_are_refused_when_they_are_pushed(graphed: GraphedDecoder) -> None:
    session = graphed.stream(chunk_size=8, left_context_size=8)
    with pytest.raises(ValueError, match="codes go from 0 to 31"):
        session.push(torch.full((1, 4, 2), 32))  # not due yet
    assert session.frames == 0
    assert session.push(random_codes(0)).shape == (1, 1, 0)


@pytest.mark.gpu
def test_streams_on_a_gpu_are_the_whole() -> None:
    with GraphedDecoder(models.tiny(dtype=torch.float64, trim=9, device="cuda"), BucketPlan.grid([1, 4, 8], [5, 8, 16])) as decoder:
        decoder.warmup(strict=True)
        sessions = [decoder.stream(chunk_size=8, left_context_size=8, ramp=(5,)) for _ in range(20)]
        codes = [random_codes(3 + 7 * i).cuda() for i in range(20)]
        audios: list[list[torch.Tensor]] = [[] for _ in sessions]
        for at in range(0, 150, 11):
            pushes = [(session, c[..., at : at + 11]) for session, c in zip(sessions, codes, strict=True)]
            for audio, new in zip(audios, decoder.push_many(pushes), strict=True):
                assert (new.device, new.dtype) == (codes[0].device, torch.float64)
                audio.append(new)
        for session, c, audio in zip(sessions, codes, audios, strict=True):
            joined = torch.cat([*audio, session.flush()], -1)
            torch.testing.assert_close(joined, decoder.module(c), rtol=0, atol=1e-12)
