"""Chunked, batched and streamed decoding on a GPU: full-size Code2Wav through graphs, and the knobbed decoder for each trim."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from omnigraph.chunks import Chunking
from omnigraph.compare import Reference, relative_error, within_rule
from omnigraph.decoder import GraphedDecoder
from omnigraph.models import code2wav, tiny
from omnigraph.shapes import BucketPlan

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
FULL = BucketPlan.grid([1, 2, 4, 8], [25, 32, 50])
AROUND = sorted({n + d for n in range(25, 701, 25) for d in (-1, 0, 1)} - {701} | {1, 2})
RAGGED = [0, 1, 1, 2, 24, 25, 26, 0, 50, 51, 97, 130, 97]
TRIMS = [0, 1, 7, 9, 20]  # at 8 samples a frame: none, one, upsample - 1, more than upsample, more than two frames


def draw(decoder: GraphedDecoder, batch: int, frames: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(decoder.codebook_size, (batch, decoder.num_quantizers, frames), generator=generator).to(DEVICE)


def cutting(decoder: GraphedDecoder, chunk: int, context: int, ramp: tuple[int, ...] = ()) -> Chunking:
    return Chunking(chunk, context, decoder.facts.upsample, decoder.facts.trim, ramp, decoder.facts.lookahead or 0)


@torch.no_grad()
def chunk_by_chunk(call: Callable[[Tensor], Tensor], codes: Tensor, cut: Chunking) -> Tensor:
    """What is compared with: the chunks of codes `[B, Q, F]` one after the other, eagerly."""
    chunks = cut.schedule(codes.shape[-1])
    return torch.cat([call(codes[..., c.first : c.last])[..., c.skip : c.skip + c.keep] for c in chunks], -1)


def pieces(codes: Tensor, most: int) -> list[Tensor]:
    """`codes` as they might come: 0 to `most` frames at a time."""
    sizes: list[int] = []
    while sum(sizes) < codes.shape[-1]:
        sizes.append(min(random.randint(0, most), codes.shape[-1] - sum(sizes)))
    return list(codes.split(sizes, -1)) if sizes else []


def streamed(decoder: GraphedDecoder, codes: Sequence[Tensor], cut: Chunking) -> list[Tensor]:
    """Each of `codes` pushed to a stream of its own, a few frames at a time; now and then several streams in one call."""
    cuts = {"chunk_size": cut.chunk_size, "left_context_size": cut.left_context_size, "ramp": cut.ramp}
    sessions = [decoder.stream(**cuts) for _ in codes]
    left = [pieces(c, 2 * cut.chunk_size) for c in codes]
    audios: list[list[Tensor]] = [[] for _ in codes]
    while waiting := [i for i, rest in enumerate(left) if rest]:
        chosen = random.sample(waiting, random.randint(1, len(waiting)))
        for i, audio in zip(chosen, decoder.push_many([(sessions[i], left[i].pop(0)) for i in chosen]), strict=True):
            audios[i].append(audio)
    return [torch.cat([*audio, session.flush()], -1)[0] for audio, session in zip(audios, sessions, strict=True)]


@contextmanager
def warm(module: torch.nn.Module, plan: BucketPlan) -> Iterator[GraphedDecoder]:
    with GraphedDecoder(module, plan) as decoder:
        decoder.warmup(strict=True)
        yield decoder
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


# -- full size --


@pytest.fixture(scope="module")
def full() -> Iterator[GraphedDecoder]:
    with warm(code2wav(dtype=torch.bfloat16, device=DEVICE), FULL) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def reference(full: GraphedDecoder) -> Reference:
    return Reference(full.module)


def judge(audio: Tensor, eager: Tensor, exact: Tensor) -> None:
    """The design's rule 2 for what is not bitwise eager's."""
    assert (audio.shape, audio.dtype, audio.device) == (eager.shape, eager.dtype, eager.device)
    error, eager_error = relative_error(audio, exact), relative_error(eager, exact)
    assert within_rule(error, eager_error, audio.dtype), (error, eager_error)


def test_the_length_is_a_full_decodes_around_every_boundary(full: GraphedDecoder) -> None:
    codes = draw(full, 1, 700)
    audios = full.batched_chunked_decode(codes.expand(len(AROUND), -1, -1), AROUND, 25, 25)
    for n, audio in zip(AROUND, audios, strict=True):
        with torch.no_grad():
            assert audio.shape == full.module(codes[..., :n]).shape[1:], n
        assert audio.isfinite().all()
        assert audio.shape == full.chunked_decode(codes[..., :n], 300, 25).shape[1:], n
        assert relative_error(audio, audios[-1][:, : audio.shape[1]]) < 0.15, n  # later codes change no sample beyond its rounding


@pytest.mark.parametrize("ramp", [(), (4, 4, 8, 16)])
def test_with_all_context_no_seam_is_heard(full: GraphedDecoder, reference: Reference, ramp: tuple[int, ...]) -> None:
    """Code2Wav reaches back over some 500 frames: only a context of everything before covers that."""
    codes = draw(full, 1, 300, seed=1)
    audio = full.chunked_decode(codes, 25, 300, ramp=ramp)
    with torch.no_grad():
        eager, exact = full.module(codes), reference(codes)
    judge(audio, eager, exact)
    joints = [c.at for c in cutting(full, 25, 300, ramp).schedule(300)][1:]
    near = torch.cat([torch.arange(at - 200, at + 200) for at in joints]).to(DEVICE)
    error, eager_error = (relative_error(a[..., near], exact[..., near]) for a in (audio, eager))
    assert error <= 1.25 * eager_error, (error, eager_error)  # 400 samples a joint vary more than all do


def test_batched_is_each_alone(full: GraphedDecoder, reference: Reference) -> None:
    codes, cut = draw(full, len(RAGGED), 130, seed=2), cutting(full, 25, 25)
    parts = [codes[i : i + 1, :, :n] for i, n in enumerate(RAGGED)]
    batched = full.batched_chunked_decode(codes, RAGGED, 25, 25)
    bounded = full.batched_chunked_decode(codes, RAGGED, 25, 25, max_batch_size=3)
    single = [full.chunked_decode(part, 25, 25)[0] for part in parts]
    eager, exact = ([chunk_by_chunk(call, part, cut)[0] for part in parts if part.shape[-1]] for call in (full.module, reference))
    for audios in (batched, bounded, single):
        assert [tuple(audio.shape) for audio in audios] == [(1, full.facts.samples(n) if n else 0) for n in RAGGED]
        assert {(audio.dtype, audio.device) for audio in audios} == {(torch.bfloat16, DEVICE)}
        judge(torch.cat(audios, -1), torch.cat(eager, -1), torch.cat(exact, -1))
    rounding = relative_error(torch.cat(eager, -1), torch.cat(exact, -1))
    for audio, other, n in zip(batched, single, RAGGED, strict=True):
        assert n < 24 or relative_error(audio, other) <= 3 * rounding, n


def test_a_stream_is_the_offline_result(full: GraphedDecoder, reference: Reference) -> None:
    cut = cutting(full, 25, 25, (5,))
    codes = [draw(full, 1, n, seed=n) for n in (0, 1, 5, 30, 31, 96, 143, 143)]
    audios = streamed(full, codes, cut)
    offline = [full.chunked_decode(c, 25, 25, ramp=(5,))[0] for c in codes]
    assert [a.shape for a in audios] == [a.shape for a in offline] == [(1, cut.samples(c.shape[-1])) for c in codes]
    eager, exact = (torch.cat([chunk_by_chunk(call, c, cut)[0] for c in codes if c.shape[-1]], -1) for call in (full.module, reference))
    judge(torch.cat(audios, -1), eager, exact)
    judge(torch.cat(offline, -1), eager, exact)


def test_no_frames_give_no_samples_in_the_form_of_the_decoder(full: GraphedDecoder) -> None:
    for audio in (full.chunked_decode(draw(full, 2, 0)), full.batched_chunked_decode(draw(full, 2, 9), [0, 0])[0][None]):
        assert (audio.shape[1:], audio.dtype, audio.device) == ((1, 0), torch.bfloat16, DEVICE)


# -- the knobbed decoder, in float64: equal to the last digits --


@pytest.fixture(scope="module", params=TRIMS)
def knobbed(request: pytest.FixtureRequest) -> Iterator[GraphedDecoder]:
    with warm(tiny(trim=request.param, dtype=torch.float64, device=DEVICE), BucketPlan.grid([1, 4, 8], [8, 16, 32])) as decoder:
        yield decoder


@torch.no_grad()
def whole(decoder: GraphedDecoder, codes: Tensor) -> Tensor:
    """A full decode, empty where `codes` are too few for a sample."""
    frames, facts = codes.shape[-1], decoder.facts
    audio = decoder.module(codes) if facts.samples(frames) else torch.empty(1, 1, 0)
    return audio.to(DEVICE, torch.float64)


def same(audio: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(audio, expected, rtol=0, atol=1e-12)


def test_knobbed_seams_are_exact_around_every_boundary(knobbed: GraphedDecoder) -> None:
    codes = draw(knobbed, 1, 700)
    expected = whole(knobbed, codes)
    audios = knobbed.batched_chunked_decode(codes.expand(len(AROUND), -1, -1), AROUND, 25, 6)
    for n, audio in zip(AROUND, audios, strict=True):
        assert audio.shape[-1] == knobbed.facts.samples(n)
        same(audio, expected[0, :, : audio.shape[-1]])
    for n in (1, 4, 25, 26, 299, 300, 301, 700):
        same(knobbed.chunked_decode(codes[..., :n], 300, 25), expected[..., : knobbed.facts.samples(n)])
    assert knobbed.stats.hits > 0


@pytest.mark.parametrize("ramp", [(), (1,), (5,), (4, 4, 8, 16)])
def test_knobbed_batches_and_streams_are_each_the_whole(knobbed: GraphedDecoder, ramp: tuple[int, ...]) -> None:
    codes = [draw(knobbed, 1, n, seed=n) for n in [*RAGGED, 700]]
    expected = [whole(knobbed, c)[0] for c in codes]
    padded = torch.cat([torch.nn.functional.pad(c, (0, 700 - c.shape[-1])) for c in codes])
    batched = knobbed.batched_chunked_decode(padded, [*RAGGED, 700], 25, 7, ramp=ramp)
    for audios in (batched, streamed(knobbed, codes, cutting(knobbed, 25, 7, ramp))):
        for audio, full_decode in zip(audios, expected, strict=True):
            same(audio, full_decode)


def test_a_lookahead_is_taken_from_the_right_and_never_padded() -> None:
    with warm(tiny(trim=3, lookahead=2, dtype=torch.float64, device=DEVICE), BucketPlan.grid([1, 4], [8, 16, 32])) as decoder:
        codes = [draw(decoder, 1, n, seed=n) for n in (1, 2, 24, 25, 26, 27, 28, 130)]
        for audio, c in zip(streamed(decoder, codes, cutting(decoder, 25, 6)), codes, strict=True):
            same(audio[None], whole(decoder, c))
            same(decoder.chunked_decode(c, 25, 6), whole(decoder, c))
        assert not decoder.stats.kinds["padded"]
