"""Packing, and requests of many lengths decoded by chunks: the same audio as alone, in few calls, never more rows than allowed."""

from __future__ import annotations

import copy
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from statistics import median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnigraph import GraphedDecoder, capture, models, probe
from omnigraph._joining import batched_chunked, chunked
from omnigraph.chunks import Chunk, schedule
from omnigraph.facts import DecoderFacts
from omnigraph.packing import Call, pack, packer
from omnigraph.shapes import Bucket, BucketPlan, Cost, How, Shape, route

RAGGED = [37, 52, 81, 110, 143, 190, 222, 300]
GRID = BucketPlan.grid([1, 2, 4, 8], [25, 32, 50]).buckets
WINDOWS = [c.last - c.first for n in RAGGED for c in schedule(n, chunk_size=25, left_context_size=25, upsample=1920, trim=555)]


def linear(shape: Shape, how: How) -> float:
    """Near what Code2Wav takes on an H200."""
    return {"eager": 11.5, "plain": 2.5, "compiled": 1.7}[how] + 0.07 * shape.batch * shape.frames


def bent(shape: Shape, how: How) -> float:
    return {"eager": 8.0, "plain": 1.0, "compiled": 0.7}[how] + 0.3 * (shape.batch * shape.frames) ** 0.8


def price(found: Sequence[Call], cost: Cost) -> float:
    """What calls cost: each of their replays, or eager."""
    return sum(
        sum(cost(p.bucket.shape, "compiled" if p.bucket.compiled else "plain") for p in c.route.parts) or cost(c.shape, "eager")
        for c in found
    )


def test_the_ragged_requests_take_seven_replays() -> None:
    calls = pack(WINDOWS, GRID)
    assert len(WINDOWS) == 49
    assert [len(c.route.parts) for c in calls] == [1] * 7
    assert len(pack(WINDOWS, GRID, linear)) == 7


def test_the_ragged_requests_cost_less_than_round_by_round() -> None:
    """Grouping equal lengths within a round makes 19 calls."""
    rounds = Counter(
        (number, c.last - c.first)
        for n in RAGGED
        for number, c in enumerate(schedule(n, chunk_size=25, left_context_size=25, upsample=1920, trim=555))
    )
    grouped = [Call(route(Shape(rows, frames), GRID, linear), ()) for (_, frames), rows in rounds.items()]
    assert len(grouped) == 19
    assert price(grouped, linear) > 1.2 * price(pack(WINDOWS, GRID, linear), linear)


buckets = st.lists(
    st.builds(Bucket, st.builds(Shape, st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([10, 25, 32, 50])), st.booleans()),
    max_size=7,
    unique=True,
)
lengths = st.lists(st.one_of(st.just(50), st.just(25), st.integers(1, 60)), max_size=30)


@given(lengths, buckets, st.sampled_from([None, linear, bent]), st.sampled_from([None, 1, 2, 3, 5, 8, 40]), st.booleans(), st.booleans())
def test_each_window_is_packed_once_within_the_limits(
    lengths: list[int], captured: list[Bucket], cost: Cost | None, limit: int | None, pad_frames: bool, pad_batch: bool
) -> None:
    calls = pack(lengths, captured, cost, max_batch_size=limit, pad_frames=pad_frames, pad_batch=pad_batch)
    assert sorted(i for c in calls for i in c.windows) == list(range(len(lengths)))
    for c in calls:
        rows = [lengths[i] for i in c.windows]
        assert c.shape == (len(rows), rows[0])
        assert rows == sorted(rows, reverse=True)
        assert pad_frames or rows[0] == rows[-1]
        assert len(rows) <= (limit or max([8, *(b.shape.batch for b in captured)]))
        assert c.route == route(c.shape, captured, cost, pad_frames=pad_frames, pad_batch=pad_batch)  # what dispatch will find


def best_price(lengths: list[int], captured: Sequence[Bucket], cost: Cost) -> float:
    """The cheapest way to group at most 8 windows a call, by trying all groups: a bit mask says which windows are left."""
    paid = cache(lambda rows, frames: price([Call(route(Shape(rows, frames), captured, cost), ())], cost))

    @cache
    def least(left: int) -> float:
        if not left:
            return 0.0
        first, found = left & -left, math.inf
        rest, others = left ^ first, left ^ first
        while True:
            group = first | others
            rows = [n for i, n in enumerate(lengths) if group >> i & 1]
            if len(rows) <= 8:
                found = min(found, paid(len(rows), max(rows)) + least(left ^ group))
            if not others:
                return found
            others = (others - 1) & rest

    return least((1 << len(lengths)) - 1)


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([50, 25, 12, 33, 47, 60]), max_size=7),
    st.sampled_from([[1, 2, 4, 8], [1, 4], [8]]),
    st.sampled_from([linear, bent]),
)
def test_packing_is_the_cheapest_there_is(lengths: list[int], batches: list[int], cost: Cost) -> None:
    captured = BucketPlan.grid(batches, [25, 32, 50]).buckets
    assert price(pack(lengths, captured, cost), cost) == pytest.approx(best_price(lengths, captured, cost))


@pytest.mark.parametrize("captured", [GRID, BucketPlan.from_chunking(25, 25, [1, 2, 4, 8]).buckets, ()])
@pytest.mark.parametrize("limit", [None, 1000])
def test_packing_is_quick(captured: tuple[Bucket, ...], limit: int | None) -> None:
    """10,000 windows take 10 to 20 ms of a core."""
    windows = [50 if i % 4 else 1 + i % 50 for i in range(10_000)]
    times = []
    for _ in range(3):
        start = time.process_time()
        pack(windows, captured, max_batch_size=limit)
        times.append(time.process_time() - start)
    assert min(times) < 0.1


def test_a_packer_remembers_prices_and_packs_alike() -> None:
    asked: Counter[Shape] = Counter()

    def counted(shape: Shape, how: How) -> float:
        asked[shape] += how == "eager"
        return linear(shape, how)

    packed = packer(GRID, counted)
    first = packed(WINDOWS, None)
    before = asked.copy()
    assert packed(WINDOWS, None) == first == pack(WINDOWS, GRID, linear)
    assert asked == before
    assert packed(WINDOWS, 3) == pack(WINDOWS, GRID, linear, max_batch_size=3)


def test_dependent_rows_are_decoded_one_by_one() -> None:
    assert [str(c.shape) for c in pack([50, 50, 25], GRID, pad_batch=False, split=False)] == ["1x50", "1x50", "1x25"]


def test_what_is_left_makes_one_eager_call() -> None:
    assert [str(c.shape) for c in pack([50] * 11, (), max_batch_size=16)] == ["11x50"]


@pytest.mark.parametrize(("lengths", "limit"), [([0], None), ([5, -1], None), ([5], 0), ([5], -2)])
def test_impossible_packings_are_refused(lengths: list[int], limit: int | None) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        pack(lengths, GRID, max_batch_size=limit)


class Plain:
    """A decoder without graphs that packs for `captured`, and remembers the shapes of its calls."""

    device = torch.device("cpu")

    def __init__(self, module: Callable[[torch.Tensor], torch.Tensor], facts: DecoderFacts, captured: Sequence[Bucket] = GRID) -> None:
        self.module, self.facts, self.captured = module, facts, captured
        self.calls: list[Shape] = []

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        self.calls.append(Shape(codes.shape[0], codes.shape[2]))
        return self.module(codes)

    def check(self, codes: torch.Tensor, *, empty: bool = False, values: bool = True) -> None:
        if codes.dim() != 3 or codes.shape[1] != self.facts.num_quantizers:
            raise ValueError(f"codes of the shape {tuple(codes.shape)}")

    def pack(self, lengths: Sequence[int], max_batch_size: int | None = None) -> list[Call]:
        return pack(lengths, self.captured, max_batch_size=max_batch_size, pad_frames=self.facts.causal, split=self.facts.rows_independent)


@cache
def tiny(**knobs: int) -> tuple[models.TinyDecoder, DecoderFacts]:
    module = models.tiny(dtype=torch.float64, **knobs)
    return module, probe(module, reach=12, frames=24)


def random_codes(batch: int, frames: int, quantizers: int = 4, size: int = 32) -> torch.Tensor:
    return torch.randint(size, (batch, quantizers, frames))


TRIMS = [0, 1, 7, 9, 20]  # at 8 samples a frame: none, one, upsample - 1, more than upsample, more than two frames


@pytest.mark.parametrize("trim", TRIMS)
@pytest.mark.parametrize("lookahead", [0, 2])
def test_batched_is_each_alone_is_the_whole(trim: int, lookahead: int) -> None:
    module, facts = tiny(trim=trim, lookahead=lookahead)
    decoder = Plain(module, facts)
    lengths = [0, 1, 1, 2, 3, 17, 24, 25, 26, 50, 51, 51, 97, 0, 130]
    codes = random_codes(len(lengths), 140)
    audios = batched_chunked(decoder, codes, lengths, chunk_size=25, left_context_size=6)
    assert len(decoder.calls) < 12 or lookahead
    for row, (audio, n) in enumerate(zip(audios, lengths, strict=True)):
        assert audio.shape == (1, facts.samples(n))
        assert audio.dtype == torch.float64
        if audio.numel():
            alone = chunked(Plain(module, facts), codes[row : row + 1, :, :n], chunk_size=25, left_context_size=6)
            torch.testing.assert_close(audio[None], alone, rtol=0, atol=1e-12)
            torch.testing.assert_close(audio[None], module(codes[row : row + 1, :, :n]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("trim", [0, 9])
def test_the_length_is_that_of_a_full_decode(trim: int) -> None:
    module, facts = tiny(trim=trim)
    codes = random_codes(1, 700)
    whole = module(codes)
    around = {n + d for n in range(25, 700, 25) for d in (-1, 0, 1)} | {1, 2, 3, 5, 700}
    for n in sorted(around):
        audio = chunked(Plain(module, facts), codes[..., :n], chunk_size=25, left_context_size=25)
        assert audio.shape[-1] == facts.samples(n)
        torch.testing.assert_close(audio, whole[..., : facts.samples(n)], rtol=0, atol=1e-12)


def test_too_little_context_changes_samples_but_not_their_number() -> None:
    module, facts = tiny()
    codes = random_codes(1, 60)
    audio = chunked(Plain(module, facts), codes, chunk_size=20, left_context_size=1)
    error = (audio - module(codes)).abs().view(60, 8).amax(-1)
    assert (error > 1e-9).nonzero().flatten().tolist() == [20, 21, 40, 41]  # of three frames of receptive field, two are missing


@pytest.mark.parametrize("limit", [1, 2, 3, None])
def test_no_call_is_larger_than_allowed(limit: int | None) -> None:
    module, facts = tiny()
    decoder = Plain(module, facts, captured=())
    batched_chunked(decoder, random_codes(8, 300), RAGGED, chunk_size=25, left_context_size=25, max_batch_size=limit)
    assert sum(shape.batch for shape in decoder.calls) == 49
    assert max(shape.batch for shape in decoder.calls) == (limit or 8)


def test_a_decoder_that_looks_ahead_is_not_padded() -> None:
    module, facts = tiny(lookahead=2)
    decoder = Plain(module, facts)
    batched_chunked(decoder, random_codes(8, 300), RAGGED, chunk_size=25, left_context_size=25)
    windows = Counter(c.last - c.first for n in RAGGED for c in schedule(n, chunk_size=25, left_context_size=25, upsample=8, lookahead=2))
    found: Counter[int] = Counter()
    for shape in decoder.calls:
        found[shape.frames] += shape.batch
    assert found == windows


def test_what_lies_beyond_the_lengths_is_never_decoded() -> None:
    module, facts = tiny()
    codes = random_codes(3, 80)
    lengths = [10, 33, 80]
    expected = batched_chunked(Plain(module, facts), codes, lengths, chunk_size=25)
    for row, n in enumerate(lengths):
        codes[row, :, n:] = -1  # outside the codebook: decoding it would raise
    assert all(map(torch.equal, batched_chunked(Plain(module, facts), codes, lengths, chunk_size=25), expected))


def test_a_ramp_changes_only_the_cuts() -> None:
    module, facts = tiny(trim=3)
    codes = random_codes(2, 90)
    for ramp in ((5,), (4, 4, 8, 16), (1,)):
        decoder = Plain(module, facts)
        audio = chunked(decoder, codes, chunk_size=25, left_context_size=10, ramp=ramp)
        torch.testing.assert_close(audio, module(codes), rtol=0, atol=1e-12)


def test_no_frames_give_no_samples_in_the_form_of_the_decoder() -> None:
    module, facts = tiny(channels=2)
    decoder = Plain(module, facts)
    audios = batched_chunked(decoder, random_codes(2, 9), [0, 0])
    assert [(a.shape, a.dtype) for a in audios] == [((2, 0), torch.float64)] * 2
    assert chunked(decoder, random_codes(3, 0)).shape == (3, 2, 0)
    assert batched_chunked(decoder, random_codes(2, 0), [0, 0])[0].shape == (2, 0)
    assert decoder.calls == []


def test_lengths_may_be_a_tensor() -> None:
    module, facts = tiny()
    codes = random_codes(2, 30)
    audios = batched_chunked(Plain(module, facts), codes, torch.tensor([30, 7]))
    assert [a.shape[-1] for a in audios] == [240, 56]


@pytest.mark.parametrize(
    "lengths",
    [[5], [5, 6, 7], [5, -1], [5, 31], [5, 2.0], [5, "6"], [5, True], [5, None], torch.tensor([5.0, 6.0]), torch.tensor([[5, 6]])],
)
def test_wrong_lengths_are_refused_before_any_work(lengths: list[int]) -> None:
    module, facts = tiny()
    decoder = Plain(module, facts)
    with pytest.raises(ValueError, match="expected 2 lengths"):
        batched_chunked(decoder, random_codes(2, 30), lengths)
    assert decoder.calls == []


@pytest.mark.parametrize(
    "wrong", [{"chunk_size": 0}, {"left_context_size": -1}, {"ramp": (0,)}, {"max_batch_size": 0}, {"left_context_size": 2}]
)
def test_wrong_sizes_are_refused_before_any_work(wrong: dict[str, int]) -> None:
    module, facts = tiny(trim=20)
    decoder = Plain(module, facts)
    with pytest.raises(ValueError, match="at least"):
        batched_chunked(decoder, random_codes(2, 60), [60, 30], **{"chunk_size": 25, **wrong})
    assert decoder.calls == []


def test_codes_are_checked_first() -> None:
    module, facts = tiny()
    with pytest.raises(ValueError, match="codes of the shape"):
        batched_chunked(Plain(module, facts), random_codes(2, 30, quantizers=1), [30, 30])


@pytest.mark.parametrize(
    ("lie", "numbers"),
    [
        (lambda audio: audio[:1], "batch size 1 .* batch size 2"),
        (lambda audio: audio[..., :-1], "239 samples for 30 frames.*240"),
        (lambda audio: audio[0], "tensor"),
    ],
)
def test_a_decoder_that_returns_something_else_is_an_error(lie: Callable[[torch.Tensor], torch.Tensor], numbers: str) -> None:
    module, facts = tiny()
    with pytest.raises(ValueError, match=numbers):
        batched_chunked(Plain(lambda codes: lie(module(codes)), facts), random_codes(2, 30), [30, 30])


def test_decoders_that_cannot_be_chunked_say_so() -> None:
    module, facts = tiny(counter=True)
    with pytest.raises(ValueError, match="keeps state between calls"):
        chunked(Plain(module, facts), random_codes(1, 30))
    module, facts = tiny(lookahead=30)
    with pytest.raises(ValueError, match="looks ahead, and no bound was found"):
        chunked(Plain(module, facts), random_codes(1, 30))
    module, facts = tiny(mix_rows=True)
    with pytest.raises(ValueError, match="mixes the rows"):
        chunked(Plain(module, facts), random_codes(2, 30))


def test_mixed_rows_are_decoded_alone() -> None:
    module, facts = tiny(mix_rows=True)
    codes = random_codes(2, 60)
    for row, audio in enumerate(batched_chunked(Plain(module, facts), codes, [60, 41], chunk_size=25)):
        n = [60, 41][row]
        torch.testing.assert_close(audio[None], module(codes[row : row + 1, :, :n]), rtol=0, atol=1e-12)


# Through graphs.


@pytest.fixture(scope="module")
def graphed() -> Iterator[GraphedDecoder]:
    with GraphedDecoder(models.tiny(dtype=torch.float64, trim=9), BucketPlan.grid([1, 2, 4, 8], [25, 32, 50])) as decoder:
        decoder.warmup(strict=True)
        yield decoder


def replays(decoder: GraphedDecoder) -> int:
    return sum(n * len(outcome.buckets) for (_, outcome), n in decoder.stats.counts().items())


def test_the_ragged_requests_through_graphs(graphed: GraphedDecoder) -> None:
    codes = random_codes(8, 300)
    graphed.stats.reset()
    audios = graphed.batched_chunked_decode(codes, RAGGED, chunk_size=25, left_context_size=25)
    assert graphed.stats.calls == graphed.stats.hits == replays(graphed) == 7
    for row, (audio, n) in enumerate(zip(audios, RAGGED, strict=True)):
        torch.testing.assert_close(audio[None], graphed.module(codes[row : row + 1, :, :n]), rtol=0, atol=1e-12)


def test_dispatch_does_what_was_planned(graphed: GraphedDecoder) -> None:
    windows = [random.randint(1, 60) for _ in range(60)]
    for limit in (None, 3):
        planned = graphed.pack(windows, limit)
        graphed.stats.reset()
        for call in planned:
            graphed.decode(random_codes(*call.shape))
        served = Counter({(shape, outcome.buckets): n for (shape, outcome), n in graphed.stats.counts().items()})
        assert served == Counter((call.shape, tuple(part.bucket for part in call.route.parts)) for call in planned)


def test_a_reconfiguration_changes_the_packing() -> None:
    with GraphedDecoder(models.tiny(), BucketPlan.grid([1], [50])) as decoder:
        decoder.warmup(strict=True)
        for plan in (BucketPlan.grid([1], [50]), BucketPlan.grid([1, 8], [50]), BucketPlan.grid([1], [50, 25])):
            decoder.reconfigure(plan)
            for call in decoder.pack([50] * 8 + [25]):
                assert decoder.served(call.shape).buckets == tuple(part.bucket for part in call.route.parts)


@pytest.mark.parametrize("limit", [1, 3, None])
def test_audio_does_not_depend_on_the_packing(graphed: GraphedDecoder, limit: int | None) -> None:
    codes, lengths = random_codes(6, 130), [130, 0, 1, 77, 77, 51]
    for row, audio in enumerate(graphed.batched_chunked_decode(codes, lengths, chunk_size=25, left_context_size=7, max_batch_size=limit)):
        n = lengths[row]
        assert audio.shape == (1, max(n * 8 - 9, 0))
        if audio.numel():
            torch.testing.assert_close(audio[None], graphed.module(codes[row : row + 1, :, :n]), rtol=0, atol=1e-12)


def test_the_results_are_the_callers_own(graphed: GraphedDecoder) -> None:
    codes = random_codes(2, 60)
    audios = graphed.batched_chunked_decode(codes, [60, 30], chunk_size=25)
    copies = [audio.clone() for audio in audios]
    graphed.batched_chunked_decode(random_codes(8, 300), RAGGED, chunk_size=25)  # through the same buffers
    assert all(map(torch.equal, audios, copies))


@pytest.mark.parametrize("trim", TRIMS)
def test_the_length_through_graphs_is_that_of_a_full_decode(trim: int) -> None:
    module = models.tiny(dtype=torch.float64, trim=trim)
    with GraphedDecoder(module, BucketPlan.from_chunking(25, 25, [1, 4, 8])) as decoder:
        decoder.warmup(strict=True)
        codes = random_codes(1, 700)
        whole = module(codes)
        for n in [*range(1, 8), *sorted({n + d for n in range(25, 700, 75) for d in (-1, 0, 1)}), 700]:
            audio = decoder.chunked_decode(codes[..., :n], chunk_size=25, left_context_size=25)
            assert audio.shape == (1, 1, max(n * 8 - trim, 0))
            torch.testing.assert_close(audio, whole[..., : audio.shape[-1]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{"padding": "exact"}, {"enabled": False}, {"backend": "eager"}, {"cost": bent}])
def test_other_ways_to_decode_give_the_same(options: dict[str, object]) -> None:
    module = models.tiny(dtype=torch.float64, trim=3)
    codes, lengths = random_codes(3, 90), [90, 41, 5]
    with GraphedDecoder(module, BucketPlan.grid([1, 4], [25, 50]), **options) as decoder:
        decoder.warmup()
        for row, audio in enumerate(decoder.batched_chunked_decode(codes, lengths, chunk_size=25)):
            torch.testing.assert_close(audio[None], module(codes[row : row + 1, :, : lengths[row]]), rtol=0, atol=1e-12)
        if options.get("padding") == "exact":
            assert decoder.stats.padded_frames == 0
        decoder.chunked_decode(codes, chunk_size=25)


def test_wrong_codes_are_refused_before_any_work(graphed: GraphedDecoder) -> None:
    graphed.stats.reset()
    for wrong in (random_codes(2, 60, quantizers=1), random_codes(2, 60).int(), random_codes(2, 60)[0], [1, 2], torch.full((2, 4, 60), 32)):
        with pytest.raises((ValueError, TypeError), match="codes"):
            graphed.chunked_decode(wrong)
    assert graphed.stats.calls == 0
    assert graphed.chunked_decode(random_codes(2, 0)).shape == (2, 1, 0)


def error(audio: torch.Tensor, reference: torch.Tensor) -> float:
    return float((audio.double() - reference.double()).norm() / reference.double().norm())


def check_the_error_of_chunks(decoder: GraphedDecoder, context: int, chunk: int, frames: int) -> None:
    """By the design's rule: 1.1 times eager's own error against higher precision."""
    module, dtype = decoder.module, decoder.facts.dtype
    codes = random_codes(1, frames, decoder.num_quantizers, decoder.codebook_size).to(decoder.device)
    with torch.no_grad():
        eager = module(codes)
        reference = copy.deepcopy(module).to(torch.float64 if dtype == torch.float32 else torch.float32)(codes)
    audio = decoder.chunked_decode(codes, chunk_size=chunk, left_context_size=context)
    print(f"\n{dtype}, {context} frames of context: error {error(audio, reference):.3g}, eager's {error(eager, reference):.3g}")
    assert audio.shape == eager.shape
    assert error(audio, reference) <= 1.1 * error(eager, reference) + torch.finfo(dtype).eps


def test_code2wav_in_chunks_is_as_near_as_eager() -> None:
    """Two layers with windows of 16 frames and the convolutions after them reach 38 frames back."""
    with GraphedDecoder(models.code2wav("small"), BucketPlan.grid([2], [68])) as decoder:
        decoder.warmup(strict=True)
        check_the_error_of_chunks(decoder, context=38, chunk=30, frames=100)
        with pytest.raises(AssertionError):
            check_the_error_of_chunks(decoder, context=19, chunk=30, frames=100)
        assert decoder.stats.hits == decoder.stats.calls > 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_capture_around_it_records_the_eager_calls(device: str) -> None:
    with GraphedDecoder(models.tiny(dtype=torch.float64, device=device), BucketPlan.grid([1, 2], [25, 50])) as decoder:
        decoder.warmup(strict=True)
        first, second = random_codes(1, 90).to(device), random_codes(1, 90).to(device)
        outer = capture(lambda codes: decoder.chunked_decode(codes, chunk_size=25), first)
        torch.testing.assert_close(outer.replay(second), decoder.module(second), rtol=0, atol=1e-12)
        assert decoder.stats.fallbacks["outer_capture"] > 0


# On a GPU, at full size: run with `pytest -m gpu -s tests/test_batched.py`.


def round_by_round(decoder: GraphedDecoder, codes: torch.Tensor, lengths: Sequence[int]) -> tuple[list[torch.Tensor], int]:
    """The loop to beat: chunks of one round and of equal length share a call; a batch size without a graph of its own goes eager."""
    facts, batches, calls = decoder.facts, {b.shape.batch for b in decoder.captured}, 0
    rounds: dict[tuple[int, int], list[tuple[int, Chunk]]] = {}
    for row, n in enumerate(lengths):
        cut = schedule(n, chunk_size=25, left_context_size=25, upsample=facts.upsample, trim=facts.trim)
        for number, chunk in enumerate(cut):
            rounds.setdefault((number, chunk.last - chunk.first), []).append((row, chunk))
    audios = [torch.empty(facts.channels, facts.samples(n), dtype=facts.dtype, device=codes.device) for n in lengths]
    for _, jobs in sorted(rounds.items(), key=lambda item: item[0]):
        windows = torch.stack([codes[row, :, c.first : c.last] for row, c in jobs])
        with torch.no_grad():
            audio = decoder.decode(windows) if len(jobs) in batches else decoder.module(windows)
        calls += 1
        for (row, c), samples in zip(jobs, audio, strict=True):
            audios[row][:, c.at : c.at + c.keep].copy_(samples[:, c.skip : c.skip + c.keep])
    return audios, calls


@pytest.mark.gpu
def test_packing_beats_the_rounds_on_a_gpu() -> None:
    module = models.code2wav(dtype=torch.bfloat16, device="cuda")
    with GraphedDecoder(module, BucketPlan.grid([1, 2, 4, 8], [25, 32, 50])) as decoder:
        decoder.warmup(strict=True)
        codes = torch.randint(decoder.codebook_size, (8, decoder.num_quantizers, 300), device="cuda")
        times: dict[str, list[float]] = {"packed": [], "rounds": []}
        for _ in range(8):
            for name, run in (
                ("packed", lambda: decoder.batched_chunked_decode(codes, RAGGED, chunk_size=25, left_context_size=25)),
                ("rounds", lambda: round_by_round(decoder, codes, RAGGED)),
            ):
                torch.cuda.synchronize()
                start = time.perf_counter()
                run()
                torch.cuda.synchronize()
                times[name].append((time.perf_counter() - start) * 1e3)
        decoder.stats.reset()
        audios = decoder.batched_chunked_decode(codes, RAGGED, chunk_size=25, left_context_size=25)
        taken = replays(decoder)
        eager = decoder.stats.calls - decoder.stats.hits
        rounds, calls = round_by_round(decoder, codes, RAGGED)
        packed, grouped = (median(times[name][2:]) for name in ("packed", "rounds"))
        print(f"\npacked: {taken} replays, {packed:.1f} ms {times['packed']}; rounds: {calls} calls, {grouped:.1f} ms {times['rounds']}")
        assert [a.shape for a in audios] == [r.shape for r in rounds]
        assert taken <= 8
        assert eager == 0
        assert calls == 19
        assert grouped / packed >= 1.3


@pytest.mark.gpu
@pytest.mark.parametrize("trim", TRIMS)
def test_chunks_join_without_a_seam_on_a_gpu(trim: int) -> None:
    module = models.tiny(dtype=torch.float64, trim=trim, device="cuda")
    with GraphedDecoder(module, BucketPlan.from_chunking(25, 25, [1, 4, 8])) as decoder:
        decoder.warmup(strict=True)
        codes = random_codes(1, 700).cuda()
        whole = module(codes)
        for n in range(1, 701):
            audio = decoder.chunked_decode(codes[..., :n], chunk_size=25, left_context_size=25)
            assert audio.shape == (1, 1, max(n * 8 - trim, 0))
            torch.testing.assert_close(audio, whole[..., : audio.shape[-1]], rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_are_as_near_as_eager_at_full_size_on_a_gpu(dtype: torch.dtype) -> None:
    module = models.code2wav(dtype=dtype, device="cuda")
    context = probe(models.code2wav(device="cuda"), reach=700).receptive_field
    assert context is not None, "eight layers with windows of 72 frames reach less than 700 back"
    with GraphedDecoder(module, BucketPlan(plain=(Shape(1, context + 100), Shape(2, context + 100)))) as decoder:
        decoder.warmup(strict=True)
        check_the_error_of_chunks(decoder, context, chunk=100, frames=context + 400)


@pytest.mark.gpu
def test_the_length_at_full_size_on_a_gpu() -> None:
    module = models.code2wav(dtype=torch.bfloat16, device="cuda")
    with GraphedDecoder(module, BucketPlan.from_chunking(25, 25, [1, 4, 8])) as decoder:
        decoder.warmup(strict=True)
        for n in sorted({n + d for n in (25, 50, 75, 300, 325, 600, 675) for d in (-1, 0, 1)} | {1, 2, 700}):
            codes = torch.randint(decoder.codebook_size, (1, decoder.num_quantizers, n), device="cuda")
            expected = decoder.decode(codes).shape
            assert decoder.chunked_decode(codes, chunk_size=25, left_context_size=25).shape == expected
            assert decoder.chunked_decode(codes).shape == expected
