"""`verify` finds a decoder that was broken on purpose, and leaves a right one alone."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import omnigraph.decoder as decoder_module
from omnigraph._live import Piece
from omnigraph._pool import environment
from omnigraph.compare import DRAWN, SLACK, Reference, compare, relative_error, snr_db, verify, within_rule
from omnigraph.decoder import GraphedDecoder
from omnigraph.models import code2wav, tiny
from omnigraph.shapes import Bucket, BucketPlan, Shape
from omnigraph.stats import Fallback, Outcome

PLAN = BucketPlan.grid([1, 4], [4, 8])
CALLS = [(1, 8), (4, 4), (1, 3), (3, 8), (5, 7), (1, 9)]  # exact, exact, padded, split, split, eager
EXACT, PADDED = Outcome("exact", (Bucket(Shape(1, 8)),)), Outcome("padded", (Bucket(Shape(1, 8)),), padding=1)
COMPILED = Outcome("exact", (Bucket(Shape(1, 8), True),))
EAGER = Outcome("fallback", reason=Fallback.NO_BUCKET)


@pytest.fixture
def decoder() -> Iterator[GraphedDecoder]:
    with GraphedDecoder(tiny(trim=3, channels=2), PLAN) as decoder:
        decoder.warmup(strict=True)
        yield decoder


def test_a_right_decoder_passes(decoder: GraphedDecoder) -> None:
    decoder.decode(torch.zeros(1, 4, 8, dtype=torch.int64))
    counts = decoder.stats.counts()
    found = verify(decoder, CALLS)
    assert found.ok
    assert [row.outcome.kind for row in found.rows] == ["exact", "exact", "padded", "split", "split", "fallback"]
    assert all(row.bitwise for row in found.rows if row.outcome.kind in ("exact", "fallback"))
    assert all(0 < row.eager_error < 1e-6 for row in found.rows)
    assert all(0.1 < row.peak < 2 for row in found.rows)
    assert (found.dtype, found.device) == ("float32", "cpu")
    assert str(found).startswith("6 calls in float32 on cpu: all as eager, ")
    assert decoder.stats.counts() == counts  # not counted
    frame = found.to_frame()
    assert list(frame["shape"]) == ["1x8", "4x4", "1x3", "3x8", "5x7", "1x9"]
    assert list(frame["bucket"])[2:] == ["1x4", "1x8 + 1x8 + 1x8", "4x8 + 1x8", "no_bucket"]
    assert frame["ok"].all()
    assert frame["ratio"].between(0.8, 1.2).all()


@pytest.mark.parametrize("knobs", [{"dtype": torch.bfloat16}, {"lookahead": 2}, {"mix_rows": True}, {"counter": True}, {"host_read": True}])
def test_others_pass_too(knobs: dict[str, Any]) -> None:
    with GraphedDecoder(tiny(**knobs), PLAN) as decoder:
        decoder.warmup()
        if "counter" in knobs:
            return  # a call changes the next one: nothing to compare
        found = verify(decoder, CALLS)
        assert found.ok, str(found)


def test_code2wav_passes() -> None:
    module = code2wav("small")
    with GraphedDecoder(module, BucketPlan.grid([1, 2], [8, 16])) as decoder:
        decoder.warmup(strict=True)
        found = verify(decoder, [(1, 8), (2, 16), (1, 12), (3, 16)])
    assert found.ok, str(found)


def broken(decoder: GraphedDecoder, change: Callable[[Piece], Piece]) -> None:
    """Change every piece of every route that is found from now on."""
    way = decoder._live.way

    def changed(*arguments: Any, **options: Any) -> Any:
        found = way(*arguments, **options)
        return found._replace(pieces=tuple(map(change, found.pieces)))

    decoder._live.way = changed


def no_launch(decoder: GraphedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    for graph in decoder._live.graphs.values():
        monkeypatch.setattr(graph, "launch", lambda: None)


def no_copy_in(decoder: GraphedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(decoder, lambda piece: piece._replace(there=piece.there.clone()))


def shifted(decoder: GraphedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(decoder, lambda piece: piece._replace(audio=piece.audio.roll(1, -1)))  # a copy: and stale


def late(decoder: GraphedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def shift(piece: Piece) -> Piece:
        whole = piece.graph.outputs
        return piece._replace(audio=whole[: piece.last - piece.first, :, whole.shape[-1] - piece.audio.shape[-1] :])

    broken(decoder, shift)


def too_long(decoder: GraphedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(decoder, lambda piece: piece._replace(audio=piece.graph.outputs[: piece.last - piece.first]))


def too_short(decoder: GraphedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(decoder, lambda piece: piece._replace(audio=piece.audio[..., :-1]))


def one_sample(decoder: GraphedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = decoder_module.replay

    def replay(pieces: Any, codes: Tensor) -> Tensor:
        audio = kept(pieces, codes)
        audio[..., -1] = 0
        return audio

    monkeypatch.setattr(decoder_module, "replay", replay)


def rows_swapped(decoder: GraphedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = decoder_module.replay
    monkeypatch.setattr(decoder_module, "replay", lambda pieces, codes: kept(pieces, codes).flip(0))


def another_dtype(decoder: GraphedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = decoder_module.replay
    monkeypatch.setattr(decoder_module, "replay", lambda pieces, codes: kept(pieces, codes).half())


def less_precise(decoder: GraphedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = decoder_module.replay
    monkeypatch.setattr(decoder_module, "replay", lambda pieces, codes: kept(pieces, codes).half().float())


def stale_weights(decoder: GraphedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    module = decoder.module
    module.context.weight = nn.Parameter(module.context.weight * 1.001, requires_grad=False)
    decoder.check_stale = False


NEEDED = {  # calls that show it, by index in CALLS; the others are right
    no_launch: [0, 1, 2, 3, 4],
    no_copy_in: [0, 1, 2, 3, 4],
    shifted: [0, 1, 2, 3, 4],
    late: [2, 4],
    too_long: [2, 4],
    too_short: [0, 1, 2, 3, 4],
    one_sample: [0, 1, 2, 3, 4],
    rows_swapped: [1, 3, 4],
    another_dtype: [0, 1, 2, 3, 4],
    less_precise: [0, 1, 2, 3, 4],
    stale_weights: [0, 1, 2, 3, 4],
}


@pytest.mark.parametrize("fault", NEEDED)
def test_a_broken_decoder_is_found_out(decoder: GraphedDecoder, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]) -> None:
    verify(decoder, CALLS)  # right until then, but routes are found anew
    decoder._live.ways.clear()
    fault(decoder, monkeypatch)
    found = verify(decoder, CALLS)
    wrong = [i for i, row in enumerate(found.rows) if not row.ok]
    assert wrong == NEEDED[fault]
    assert not found.ok
    assert len(str(found).splitlines()) == 1 + len(wrong)


def test_what_an_earlier_replay_left_is_no_result(decoder: GraphedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in CALLS[:5]:
        assert verify(decoder, [call]).ok
        with monkeypatch.context() as patch:
            no_launch(decoder, patch)
            assert not verify(decoder, [call]).ok  # the same codes: the right audio is there, but for the poison


def test_padding_a_decoder_that_looks_ahead_would_be_found_out() -> None:
    with GraphedDecoder(tiny(lookahead=2), PLAN) as decoder:
        decoder.warmup()
        decoder._live.facts = replace(decoder.facts, causal=True)
        found = verify(decoder, CALLS)
    assert [row.ok for row in found.rows] == [True, True, False, True, False, True]


def test_padding_a_decoder_that_mixes_rows_would_be_found_out() -> None:
    with GraphedDecoder(tiny(mix_rows=True), BucketPlan.grid([4], [8])) as decoder:
        decoder.warmup()
        decoder._live.facts = replace(decoder.facts, rows_independent=True)
        found = verify(decoder, [(4, 8), (3, 8), (8, 8)])
    assert [row.ok for row in found.rows] == [True, False, False]


def test_other_calls_go_on_while_a_decoder_is_verified(decoder: GraphedDecoder) -> None:
    codes = torch.randint(32, (1, 4, 8))
    expected, wrong, stop = decoder.module(codes), [], threading.Event()

    def calls() -> None:
        while not stop.is_set():
            if not torch.equal(decoder.decode(codes), expected):
                wrong.append(1)

    thread = threading.Thread(target=calls)
    thread.start()
    try:
        found = [verify(decoder, CALLS, seed=seed).ok for seed in range(3)]
    finally:
        stop.set()
        thread.join()
    assert found == [True] * 3
    assert not wrong
    assert decoder.stats.kinds["exact"] == decoder.stats.calls


def test_codes_are_drawn_by_the_seed(decoder: GraphedDecoder) -> None:
    seen: list[Tensor] = []
    decoder.module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].clone()))
    for seed in (0, 0, 1):
        verify(decoder, [(2, 64)], seed=seed, reference=lambda codes: decoder.module(codes).double())
    assert torch.equal(seen[0], seen[len(seen) // 3])
    assert not torch.equal(seen[0], seen[-1])


def test_the_error_of_a_short_call_is_taken_over_many() -> None:
    seen = []

    class Counted(Reference):
        def __call__(self, codes: Tensor) -> Tensor:
            seen.append(codes)
            return super().__call__(codes)

    module = code2wav("small")
    with GraphedDecoder(module, BucketPlan.grid([1], [4, 8])) as decoder:
        decoder.warmup()
        found = verify(decoder, [(1, 8)], reference=Counted(module))
        assert (found.rows[0].bitwise, len(seen)) == (True, 1)
        [row] = verify(decoder, [(1, 5)], reference=Counted(module)).rows
        assert row.bitwise or len(seen) == 2 + DRAWN // 5
        assert len({str(codes.tolist()) for codes in seen}) == len(seen)


# -- the rule itself --

EPS = torch.finfo(torch.float32).eps


def test_the_rules_edges() -> None:
    error = 1e-6
    limit = SLACK * error + EPS
    assert within_rule(limit, error, torch.float32)
    assert not within_rule(math.nextafter(limit, 1), error, torch.float32)
    assert within_rule(0.0, 0.0, torch.float32)
    assert within_rule(EPS, 0.0, torch.float32)
    assert not within_rule(2 * EPS, 0.0, torch.float32)
    assert within_rule(2 * EPS, 0.0, torch.bfloat16)
    assert not within_rule(math.nan, error, torch.float32)
    assert not within_rule(error, math.nan, torch.float32)
    assert not within_rule(math.inf, error, torch.float32)


def test_errors_are_relative_norms() -> None:
    reference = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    assert relative_error(torch.tensor([[[3.0, 4.5]]]), reference) == pytest.approx(0.1)
    assert snr_db(torch.tensor([[[3.0, 4.5]]]), reference.float()) == pytest.approx(20.0)
    assert snr_db(reference.float(), reference.float()) == math.inf


def judged(audio: Tensor, outcome: Outcome, eager: Tensor | None = None) -> str:
    reference = torch.linspace(-0.5, 0.5, 64, dtype=torch.float64).reshape(1, 1, 64)
    return compare(audio, reference.float() * (1 + 4 * EPS) if eager is None else eager, reference, Shape(1, 8), outcome).problem


def test_what_must_be_bitwise_and_what_must_not() -> None:
    eager = torch.linspace(-0.5, 0.5, 64, dtype=torch.float64).reshape(1, 1, 64).float() * (1 + 4 * EPS)
    close = eager.clone()
    close[..., 5] = torch.nextafter(close[..., 5], torch.tensor(1.0))
    far = eager * (1 + 4 * EPS)
    for outcome in (EXACT, PADDED, COMPILED, EAGER):
        assert judged(eager.clone(), outcome) == ""
        assert "over 1.1 times eager's" in judged(far, outcome) or "not bitwise" in judged(far, outcome)
        assert judged(eager * math.nan, outcome) != ""
        assert "eager gives (1, 1, 64) torch.float32" in judged(eager[..., :-1], outcome)
        assert "torch.float64" in judged(eager.double(), outcome)
    for outcome in (EXACT, EAGER):
        assert judged(close, outcome).startswith("not bitwise equal: an error of")
    for outcome in (PADDED, COMPILED):
        assert judged(close, outcome) == ""


def test_bits_are_compared_not_values() -> None:
    eager = torch.tensor([[[0.0, 1.0, math.nan]]])
    exact = torch.zeros(1, 1, 3, dtype=torch.float64)
    assert compare(eager.clone(), eager, exact, Shape(1, 3), EXACT).bitwise
    other = torch.tensor([[[-0.0, 1.0, math.nan]]])
    assert not compare(other, eager, exact, Shape(1, 3), EXACT).bitwise
    turned = eager.mT.contiguous().mT
    assert compare(turned, eager, exact, Shape(1, 3), EXACT).bitwise


@pytest.mark.parametrize(
    ("dtype", "higher"), [(torch.float32, torch.float64), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
)
def test_a_reference_is_of_higher_precision_and_a_copy(dtype: torch.dtype, higher: torch.dtype) -> None:
    module = tiny(dtype=dtype)
    codes = torch.randint(32, (1, 4, 8))
    before = module(codes)
    reference = Reference(module)
    assert reference.dtype == next(reference.module.parameters()).dtype == higher
    assert reference(codes).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        inside = reference(codes)
    assert torch.equal(inside, reference(codes))
    assert torch.equal(module(codes), before)
    assert next(module.parameters()).dtype == dtype
    for old in ("high", "highest"):
        torch.set_float32_matmul_precision(old)
        now = environment(torch.device("cpu")), environment(torch.device("cuda"))
        reference(codes)
        assert (environment(torch.device("cpu")), environment(torch.device("cuda"))) == now
        assert torch.get_float32_matmul_precision() == old
